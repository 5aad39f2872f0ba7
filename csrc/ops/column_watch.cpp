#include "ops/column_watch.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "ops/checks.h"
#include "ops/launch.h"
#include "ops/norm.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <set>
#include <unordered_set>
#endif

namespace fused_norm::ops {
namespace {

using at::Tensor;

std::function<std::string(const std::vector<Overflow>&)>* overflow_message = nullptr;
std::atomic<bool> compile_anew = false;

// Guards what follows. Under it nothing waits and nothing allocates: another thread may have to
// launch what a stream waits for, and allocators may run Python.
std::mutex mutex;

// Equal blocks that are compiled one by one may share code that was traced for one block's norm.
// For each number of columns: the most at risk in a norm that came near its room in code traced for
// another norm. Later traces have room for them.
std::map<int64_t, int64_t>& most_untraced = *new std::map<int64_t, int64_t>;
int newest_generation = -1;  // of the code that was traced last

// Whether code that is compiled anew has more room for a norm that came near its room. The norm was
// last traced in `generation`.
bool gains_room(int64_t cols, int64_t at_risk, int generation) {
  if (generation == newest_generation) return true;  // its own trace looks again
  int64_t& most = most_untraced[cols];
  return std::exchange(most, std::max(most, at_risk)) < at_risk;
}

// The room of a call with so many columns at risk. A trace has that of most_untraced at least.
int64_t room_of(const NormColumns& norm, int64_t at_risk, bool traced, bool fixed) {
  if (traced) at_risk = std::max(at_risk, most_untraced[norm.cols]);
  return room_for(at_risk, norm.cols, c10::elementSize(norm.x_dtype), fixed);
}

#ifdef FUSED_NORM_WITH_CUDA
// What a weight's norms differ in: the bias, by the number of its Norms, offsets of both in what
// they are views of, -1 without one; weight_offset, cols, dtypes, device.
using Form = std::tuple<int64_t, int64_t, int64_t, double, int64_t, at::ScalarType, at::ScalarType,
                        c10::DeviceIndex>;

// What is known of a norm.
struct Watch {
  int64_t cols;
  Overflow overflow;
  // What looks remember (columns.h): the totals of calls on `stream`, those of captured calls, and
  // the history, which all share. Where such calls run at once one may see a parameter move a step
  // sooner or later.
  c10::cuda::CUDAStream stream;
  c10::DataPtr memory;
  ColumnReport* report = nullptr;
  // Unlike the parameters, their version counters may be read while another thread frees those.
  std::array<c10::VariableVersion, 2> versions;
  ParamsSeen seen;
  ParamsHistory history{{}};
  RoomsInUse rooms;
  int64_t room = kSaveInput;  // of the next eager call
  bool captured = false;
  int generation = -1;  // of the code that was traced last
};

// Reports are in mapped host memory. Each is of one norm for ever: when that is gone, kernels may
// still be on their way.
struct Watches {
  std::unordered_set<Watch*> all;
  ColumnReport* unnamed = nullptr;  // of norms that are not known; it has the overflow signal
  ColumnReport *next = nullptr, *end = nullptr;
};
Watches& watches = *new Watches;  // outlives the tensors that it knows
#endif

// Hangs on a weight, or a bias where there is no weight, or on what these are views of (FSDP's flat
// parameters), and goes with it. A weak reference would do too, but stands in the way of
// torch.utils.swap_tensors(). Other tensors on the same memory, detach() and .data, have their own.
struct Norms : c10::BackendMeta {
  int64_t number = 0;
  int first_generation = -1, generation = -1;  // of compiled code that was traced with the weight
#ifdef FUSED_NORM_WITH_CUDA
  std::map<Form, std::unique_ptr<Watch>> forms;

  ~Norms() override {
    const std::lock_guard lock(mutex);
    for (auto& [form, watch] : forms) {
      if (!watch->captured) {
        watches.all.erase(watch.get());
        continue;
      }
      // No step waits for it, but its graph may be replayed.
      std::get<0>(watch->overflow) = 0;  // soon another tensor's address
      watch->rooms = {};
      watch.release();
    }
  }
#endif
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
};

const at::TensorBase& owner_of(const Tensor& param) {
  return !param.is_leaf() && param.is_view() ? param._base() : param;
}

// As a leaf or a view of one does; also where there is none.
bool may_come_again(const Tensor& param) { return !param.defined() || owner_of(param).is_leaf(); }

// Null for a tensor that will not come again, or that carries something of a backend's own.
Norms* norms_of(const Tensor& param, bool create) {
  if (!param.defined() || !may_come_again(param)) return nullptr;
  c10::TensorImpl* const impl = owner_of(param).unsafeGetTensorImpl();
  if (c10::BackendMeta* const meta = impl->get_backend_meta()) return dynamic_cast<Norms*>(meta);
  if (!create) return nullptr;
  static int64_t count = 0;
  auto norms = c10::make_intrusive<Norms>();
  norms->number = ++count;
  impl->set_backend_meta(norms);
  return norms.get();
}

#ifdef FUSED_NORM_WITH_CUDA

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

bool may_wait() {
  const auto mode = c10::cuda::warning_state().get_sync_debug_mode();
  return !is_capturing() && mode != c10::cuda::SyncDebugMode::L_ERROR;
}

Report newest_report(const Watch& watch) {
  return unpack_report(*static_cast<const volatile uint64_t*>(&watch.report->report));
}

// At a use of the parameters, or, without a norm, at an optimizer's step, where they may be gone.
const ParamsSeen& see_params(Watch& watch, const NormColumns& norm = {}) {
  watch.seen.version = 0;
  for (size_t i = 0; i < 2; ++i) {
    if (const Tensor& param = i == 0 ? norm.weight : norm.bias; param.defined()) {
      watch.seen.memory[i] = param.storage().data();
      watch.versions[i] = param.unsafeGetTensorImpl()->version_counter();
    }
    const c10::VariableVersion& version = watch.versions[i];
    if (version.enabled()) watch.seen.version += version.current_version();
  }
  return watch.seen;
}

// Null for a norm that is not known. It becomes known where a watch is given, if there is no reason
// against it.
Watch* find_watch(const NormColumns& norm, Watch* fresh = nullptr) {
  constexpr size_t kMostForms = 256;  // beyond them its bias or offset is another at each call
  Norms* const norms = norms_of(norm.first(), fresh != nullptr);
  const Norms* const of_bias = norms_of(norm.bias, fresh != nullptr);
  if (norms == nullptr || (norm.bias.defined() && of_bias == nullptr)) return nullptr;
  const auto offset = [](const Tensor& t) { return t.defined() ? t.storage_offset() : -1; };
  const int64_t bias = of_bias != nullptr ? of_bias->number : 0;
  const Form form{bias,      offset(norm.weight), offset(norm.bias), norm.weight_offset,
                  norm.cols, norm.x_dtype,        norm.y_dtype,      norm.first().device().index()};
  const auto known = norms->forms.find(form);
  if (known != norms->forms.end()) return known->second.get();
  if (fresh == nullptr || norms->forms.size() >= kMostForms) return nullptr;
  if (watches.next == watches.end) return nullptr;  // other threads took them
  Watch& watch = *(norms->forms[form] = std::make_unique<Watch>(std::move(*fresh)));
  watch.report = watches.next++;
  watch.history = ParamsHistory(see_params(watch, norm));
  watches.all.insert(&watch);
  return &watch;
}

// Without the lock.
void make_reports() {
  constexpr size_t kAtOnce = 4096;
  std::unique_lock lock(mutex);
  if (watches.next != watches.end) return;
  lock.unlock();
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  void* memory;
  C10_CUDA_CHECK(cudaHostAlloc(&memory, kAtOnce * sizeof(ColumnReport),
                               cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(memory, 0, kAtOnce * sizeof(ColumnReport));
  lock.lock();
  watches.next = static_cast<ColumnReport*>(memory);
  watches.end = watches.next + kAtOnce;
  if (watches.unnamed == nullptr) watches.unnamed = watches.next++;
}

// A norm that is not known becomes so, if it can, with the lock open meanwhile. One that a captured
// call is the first to use cannot: each replay would set its memory anew.
Watch* find_or_make_watch(const NormColumns& norm, bool captured,
                          std::unique_lock<std::mutex>& lock) {
  if (Watch* const known = find_watch(norm)) return known;
  lock.unlock();
  make_reports();
  if (!captured && may_come_again(norm.weight) && may_come_again(norm.bias)) {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const size_t bytes = 2 * kTotalsBytes + norm.cols * (norm.bias.defined() ? 4 : 2) *
                                                c10::elementSize(at::toOpMathType(norm.x_dtype));
    Watch fresh{norm.cols, overflow_of(norm, 0), stream,
                c10::cuda::CUDACachingAllocator::get()->allocate(bytes)};
    void* const start = fresh.memory.get();
    C10_CUDA_CHECK(cudaMemsetAsync(start, 0xff, bytes, stream));  // NaN
    C10_CUDA_CHECK(cudaMemsetAsync(start, 0, 2 * kTotalsBytes, stream));
    const std::lock_guard meanwhile(mutex);
    find_watch(norm, &fresh);
  }
  lock.lock();
  return find_watch(norm);
}

// What a kernel that is about to be launched on the current stream reports, and where. Totals are
// shared by none that may run at once.
ColumnWatch for_kernel(Watch& watch, bool captured) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const bool is_other = !captured && stream != watch.stream;
  if (is_other) c10::cuda::CUDACachingAllocator::recordStream(watch.memory, stream);
  char* const totals = static_cast<char*>(watch.memory.get());
  return {totals + 2 * kTotalsBytes, is_other ? nullptr : totals + (captured ? kTotalsBytes : 0),
          watch.report, &watches.unnamed->overflow_signal, watch.history.look()};
}

void take_look(const NormColumns& norm, const ColumnWatch& watch) {
  // No mode may see a copy of the parameters: the compiler's would make none.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor weight = aligned(norm.weight), bias = aligned(norm.bias);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto params = norm_params<NormBackwardParams>(norm, /*rows=*/0, /*rms=*/false, weight, bias);
  params.watch = watch;
  const Tensor totals = set_totals(norm, &params.watch);
  check_launch(launch_column_look(params, stream));
  c10::cuda::stream_synchronize(stream);
}

// `generation`: of the code that is traced; -1: none is.
int64_t room_on_gpu(const NormColumns& norm, int generation) {
  const c10::cuda::CUDAGuard guard(norm.first().device());
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const bool captured = is_capturing(), traced = generation >= 0, fixed = traced || captured;
  std::unique_lock lock(mutex);
  Watch* watch = find_or_make_watch(norm, captured, lock);
  if (watch == nullptr) return kSaveInput;
  const ParamsSeen& params = see_params(*watch, norm);
  if (fixed) {
    watch->history.see(params, in_backward);
  } else if (!watch->history.chooses(params, newest_report(*watch), in_backward)) {
    return watch->room;
  }
  if (!fixed) watch->room = kSaveInput;  // unless all below goes well
  if (may_wait() && (traced || !watch->history.covers(newest_report(*watch), false))) {
    const ColumnWatch look = for_kernel(*watch, /*captured=*/false);
    lock.unlock();
    take_look(norm, look);
    lock.lock();
    watch = find_watch(norm);
    if (watch == nullptr) return kSaveInput;
  }
  const Report report = newest_report(*watch);
  // Where nothing is known all columns may be lost.
  const int64_t at_risk = watch->history.covers(report, false) ? report.at_risk : norm.cols;
  const int64_t room = room_of(norm, at_risk, traced, fixed);
  if (!fixed) watch->room = room;
  // Code of an earlier generation, which had less, is not called again.
  if (traced) {
    const int before = std::exchange(watch->generation, generation);
    if (before >= 0 && before != generation) watch->rooms = {};
  }
  return room;
}

// For what the current streams of all devices have in hand, with the lock open meanwhile. Not for
// other streams: one may wait for another process, which waits for what this one is to launch next.
void wait_for_reports(std::unique_lock<std::mutex>& lock) {
  std::set<c10::DeviceIndex> devices;
  for (const Watch* watch : watches.all) devices.insert(watch->stream.device_index());
  lock.unlock();
  for (const c10::DeviceIndex device : devices) {
    const c10::cuda::CUDAGuard guard(device);
    c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream(device));
  }
  lock.lock();
}

// Before an optimizer's step. One that is captured does not happen yet.
void settle(bool changed_unseen) {
  std::unique_lock lock(mutex);
  if (watches.all.empty() || is_capturing()) return;
  bool waits = false;
  for (Watch* watch : watches.all) {
    watch->history.see(see_params(*watch), false);
    if (changed_unseen) watch->history.doubt();
    const Report report = newest_report(*watch);
    waits |= watch->rooms.any() && (watch->rooms.are_near(report, watch->cols) ||
                                    !watch->history.covers(report, watch->captured));
  }
  if (waits) wait_for_reports(lock);
  for (Watch* watch : watches.all) {
    if (waits) watch->history.waited();
    const Report report = newest_report(*watch);
    if (watch->rooms.end_step(report, watch->cols) &&
        gains_room(watch->cols, report.at_risk, watch->generation)) {
      compile_anew = true;
    }
  }
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

// What does not fit is named by the operator.
int64_t choose_room(const NormColumns& norm, int generation) {
  const Tensor& param = norm.first();
  if (!is_floating(norm.x_dtype) || !is_floating(norm.y_dtype)) return kSaveInput;
  for (const Tensor& t : {norm.weight, norm.bias}) {
    if (t.defined() && (t.is_nested() || t.layout() != at::kStrided || !t.is_floating_point() ||
                        t.numel() != norm.cols || t.device() != param.device())) {
      return kSaveInput;
    }
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (param.is_cuda()) return room_on_gpu(norm, generation);
#endif
  if (!param.is_cpu()) return kSaveInput;
  // A call on a CPU looks at its parameters. On a GPU that would be a wait.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  const auto limits = precise_limits<double>(to_dtype(norm.y_dtype));
  const int64_t lost = cpu::columns_beyond(limits, norm).numel();
  const std::lock_guard lock(mutex);
  return room_of(norm, lost, generation >= 0, generation >= 0);
}

int64_t traced_room(const OptionalTensor& weight, const OptionalTensor& bias, double weight_offset,
                    at::ScalarType x_dtype, at::ScalarType y_dtype, int generation, bool looks) {
  NormColumns norm{or_undefined(weight), or_undefined(bias), weight_offset, 0, x_dtype, y_dtype};
  if (!norm.first().defined()) return 0;
  norm.cols = norm.first().numel();
  {
    const std::lock_guard lock(mutex);
    Norms* const norms = norms_of(norm.first(), true);
    if (norms == nullptr) return kSaveInput;
    newest_generation = norms->generation = generation;
    if (norms->first_generation < 0) norms->first_generation = generation;
    if (generation - norms->first_generation >= kLastGeneration) return kSaveInput;
  }
  return looks ? choose_room(norm, generation) : 0;
}

void note_listing(const NormColumns& norm, int64_t listed, int64_t room) {
  if (!is_near(listed, room, norm.cols)) return;
  const std::lock_guard lock(mutex);
  const Norms* const norms = norms_of(norm.first(), false);
  const int generation = norms == nullptr ? -1 : norms->generation;
  if (gains_room(norm.cols, listed, generation)) compile_anew = true;
}

bool before_optimizer_step([[maybe_unused]] bool changed_unseen) {
#ifdef FUSED_NORM_WITH_CUDA
  settle(changed_unseen);
#endif
  const bool anew = compile_anew.exchange(false);
  check_overflow();  // has code compiled anew by itself
  return anew;
}

void after_optimizer_step() {
#ifdef FUSED_NORM_WITH_CUDA
  const std::lock_guard lock(mutex);
  for (Watch* watch : watches.all) watch->history.after_step(see_params(*watch));
#endif
}

void set_overflow_message(std::function<std::string(const std::vector<Overflow>&)> message) {
  overflow_message = new auto(std::move(message));  // outlives the interpreter, which it may call
}

Overflow overflow_of(const NormColumns& norm, int64_t columns) {
  const Tensor& param = norm.first();
  return {reinterpret_cast<uintptr_t>(param.unsafeGetTensorImpl()),
          c10::str("a norm with ", norm.weight.defined() ? "weight" : "bias", " of shape ",
                   param.sizes(), " and dtype ", param.scalar_type(), " on ", param.device()),
          columns};
}

void raise_overflow(const std::vector<Overflow>& overflows) {
  TORCH_CHECK(false, overflow_message != nullptr ? (*overflow_message)(overflows)
                                                 : std::get<std::string>(overflows.at(0)));
}

void check_overflow() {
#ifdef FUSED_NORM_WITH_CUDA
  std::unique_lock lock(mutex);
  if (watches.unnamed == nullptr) return;
  volatile uint32_t& signal = watches.unnamed->overflow_signal;
  if (signal == 0) return;
  if (may_wait()) wait_for_reports(lock);  // so that all is known
  signal = 0;
  std::vector<Overflow> overflows;
  const auto take = [&](ColumnReport* report, const Overflow& overflow) {
    volatile uint32_t& columns = report->overflow;
    if (columns == 0) return false;
    overflows.push_back(overflow);
    std::get<int64_t>(overflows.back()) = columns;
    columns = 0;
    return true;
  };
  take(watches.unnamed, {0, "a norm whose weight is another at each call", 0});
  for (Watch* watch : watches.all) {
    if (!take(watch->report, watch->overflow)) continue;
    watch->history.doubt();
    gains_room(watch->cols, newest_report(*watch).at_risk, watch->generation);
  }
  lock.unlock();
  if (!overflows.empty()) raise_overflow(overflows);
#endif
}

#ifdef FUSED_NORM_WITH_CUDA
ColumnWatch watch_backward(const NormColumns& norm, bool from_output, int64_t room) {
  if (!norm.first().defined()) return {};
  std::unique_lock lock(mutex);
  const bool captured = is_capturing();
  Watch* const watch = from_output ? find_or_make_watch(norm, captured, lock) : find_watch(norm);
  if (watch == nullptr && !from_output) return {};
  if (watch == nullptr)
    return {nullptr, nullptr, watches.unnamed, &watches.unnamed->overflow_signal, 0};
  watch->history.backward(see_params(*watch, norm));
  watch->captured |= captured;
  if (from_output) watch->rooms.add(room, captured, room > 0 && room != watch->room);
  return for_kernel(*watch, captured);
}

Tensor set_totals(const NormColumns& norm, ColumnWatch* watch) {
  if (watch->report == nullptr || watch->totals != nullptr) return {};
  const Tensor totals = new_tensor(norm.first(), {kTotalsBytes}, at::kByte).zero_();
  watch->totals = totals.mutable_data_ptr();
  return totals;
}
#endif

}  // namespace fused_norm::ops
