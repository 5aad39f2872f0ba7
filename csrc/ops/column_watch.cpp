#include "ops/column_watch.h"

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "cpu/norm.h"
#include "ops/checks.h"
#include "ops/rows.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <deque>
#include <future>
#include <map>
#include <unordered_map>

#include "ops/device.h"
#endif

namespace fused_norm::ops {
namespace {

using at::Tensor;

std::function<std::string(const std::vector<Overflow>&)>* overflow_message = nullptr;
std::atomic<bool> compile_anew = false;
std::mutex mutex;  // guards what follows; no Python runs under it

#ifdef FUSED_NORM_WITH_CUDA
// A parameter's tensor; null when it is gone.
using Param = std::shared_ptr<c10::TensorImpl*>;

// What a weight's norms differ in: the bias, offsets of both in what they are views of, -1 without
// one; weight_offset, cols, dtypes, device.
using Form = std::tuple<Param, int64_t, int64_t, double, int64_t, at::ScalarType, at::ScalarType,
                        c10::DeviceIndex>;

// What is known of a norm.
struct Watch {
  std::array<Param, 2> params;
  int64_t cols;
  c10::DeviceIndex device;
  ParamsHistory history;
  ColumnReport* report;
  int64_t room = kSaveInput;  // of the next eager call
  // The least of the backward calls since the last step, and of captured ones, which may be
  // replayed; -1: none.
  int64_t least_room = -1, captured_room = -1;
  bool fixed = false;  // one of them had a room that nobody can change
  bool captured = false;
  bool waits = false;   // before an optimizer's step: for this step's report
  int generation = -1;  // of the code that was traced last
  std::map<cudaStream_t, c10::DataPtr> memory;  // of looks, which streams could not share
  char* captured_memory = nullptr;
};

// Where kernels report, in mapped host memory. They may still be on their way when a norm is gone:
// reports rest before they are used again, and those of captured graphs are not.
struct Reports {
  struct Owner {
    Watch* watch;  // null when it is gone
    Overflow overflow;
  };
  std::unordered_map<ColumnReport*, Owner> owners;  // of all that were ever used
  std::deque<ColumnReport*> resting;
  ColumnReport* others_ = nullptr;

  ColumnReport* take() {
    constexpr size_t kAtOnce = 4096, kResting = 1024;
    if (resting.size() <= kResting) {
      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
      void* memory;
      C10_CUDA_CHECK(cudaHostAlloc(&memory, kAtOnce * sizeof(ColumnReport),
                                   cudaHostAllocMapped | cudaHostAllocPortable));
      for (size_t i = 0; i < kAtOnce; ++i)
        resting.push_back(static_cast<ColumnReport*>(memory) + i);
    }
    ColumnReport* const report = resting.front();
    resting.pop_front();
    *report = {};
    return report;
  }

  // Of all norms that are not remembered; it has the overflow signal.
  ColumnReport* others() {
    if (others_ != nullptr) return others_;
    others_ = take();
    owners[others_] = {nullptr, {0, "a norm whose weight is another at each call", 0}};
    return others_;
  }
};
Reports& reports = *new Reports;  // outlives the tensors that it knows
#endif

// Hangs on a weight, or a bias where there is no weight, or on what these are views of (FSDP's flat
// parameters), and goes with it. A weak reference would do too, but stands in the way of
// torch.utils.swap_tensors(). Other tensors on the same memory, detach() and .data, have their own.
struct Norms : c10::BackendMeta {
  int first_generation = -1;  // of compiled code that knows the weight
#ifdef FUSED_NORM_WITH_CUDA
  Param param;
  std::map<Form, Watch> watches;

  ~Norms() override {
    const std::lock_guard lock(mutex);
    *param = nullptr;
    for (const auto& [form, watch] : watches) {
      reports.owners[watch.report].watch = nullptr;
      if (!watch.captured) reports.resting.push_back(watch.report);
    }
  }
#endif
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
};

// Null for a tensor that will not come again, as a leaf or a view of one does, or that carries
// something of a backend's own.
Norms* norms_of(const Tensor& param, bool create) {
  if (!param.defined()) return nullptr;
  const at::TensorBase& owner = !param.is_leaf() && param.is_view() ? param._base() : param;
  if (!owner.is_leaf()) return nullptr;
  c10::TensorImpl* const impl = owner.unsafeGetTensorImpl();
  if (c10::BackendMeta* const meta = impl->get_backend_meta()) return dynamic_cast<Norms*>(meta);
  if (!create) return nullptr;
  auto norms = c10::make_intrusive<Norms>();
#ifdef FUSED_NORM_WITH_CUDA
  norms->param = std::make_shared<c10::TensorImpl*>(impl);
#endif
  impl->set_backend_meta(norms);
  return norms.get();
}

#ifdef FUSED_NORM_WITH_CUDA

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

ParamsSeen params_of(const std::array<Param, 2>& params) {
  ParamsSeen seen;
  for (size_t i = 0; i < 2; ++i) {
    c10::TensorImpl* const impl = params[i] != nullptr ? *params[i] : nullptr;
    if (impl == nullptr) continue;
    seen.memory[i] = impl->storage().data();
    if (!impl->is_inference()) seen.version += impl->version_counter().current_version();
  }
  return seen;
}

Report newest_report(const Watch& watch) {
  return unpack_report(*static_cast<const volatile uint64_t*>(&watch.report->report));
}

// Null when the norm cannot be remembered, or is not known and not to be created.
Watch* find_watch(const NormColumns& norm, bool create) {
  constexpr size_t kMostForms = 16;  // beyond them its bias or offset is another at each call
  Norms* const norms = norms_of(norm.first(), create);
  const Norms* const of_bias = norms_of(norm.bias, create);
  if (norms == nullptr || (norm.bias.defined() && of_bias == nullptr)) return nullptr;
  const Param bias = of_bias != nullptr && of_bias != norms ? of_bias->param : nullptr;
  const auto offset = [](const Tensor& t) { return t.defined() ? t.storage_offset() : -1; };
  const Form form{bias,      offset(norm.weight), offset(norm.bias), norm.weight_offset,
                  norm.cols, norm.x_dtype,        norm.y_dtype,      norm.first().device().index()};
  const auto known = norms->watches.find(form);
  if (known != norms->watches.end()) return &known->second;
  if (!create || norms->watches.size() >= kMostForms) return nullptr;
  const std::array<Param, 2> params = {norms->param, bias};
  Watch fresh{params, norm.cols, norm.first().device().index(), ParamsHistory(params_of(params)),
              reports.take()};
  Watch& watch = norms->watches.emplace(form, std::move(fresh)).first->second;
  reports.owners[watch.report] = {&watch, overflow_of(norm, 0)};
  return &watch;
}

// Memory for the looks of this stream: kTotalsBytes, and the history. Null where there is none and
// a graph is captured, which keeps what it has for ever.
char* find_memory(Watch& watch, const NormColumns& norm) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto known = watch.memory.find(stream);
  if (is_capturing()) {
    if (known == watch.memory.end()) known = watch.memory.begin();
    if (watch.captured_memory == nullptr && known != watch.memory.end()) {
      watch.captured_memory = static_cast<char*>(known->second.get());
      known->second.release_context();
      watch.memory.erase(known);
    }
    return watch.captured_memory;
  }
  if (known != watch.memory.end()) return static_cast<char*>(known->second.get());
  const size_t bytes = kTotalsBytes + norm.cols * (norm.bias.defined() ? 4 : 2) *
                                          c10::elementSize(accumulate_dtype(norm.x_dtype));
  // The first calls of code that is compiled into CUDA graphs allocate from a graph's pool, which
  // must not hold what outlives them. Another thread does not.
  const auto allocate = [&] {
    const c10::cuda::CUDAGuard guard(stream.device());
    return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  };
  c10::DataPtr memory = std::async(std::launch::async, allocate).get();
  at::cuda::CUDAEvent freed;  // by whoever had this memory before
  freed.record(c10::cuda::getDefaultCUDAStream(stream.device_index()));
  freed.block(stream);
  c10::cuda::CUDACachingAllocator::recordStream(memory, stream);
  char* const start = static_cast<char*>(memory.get());
  C10_CUDA_CHECK(cudaMemsetAsync(start, 0, kTotalsBytes, stream));
  C10_CUDA_CHECK(cudaMemsetAsync(start + kTotalsBytes, 0xff, bytes - kTotalsBytes, stream));  // NaN
  watch.memory.emplace(stream, std::move(memory));
  watch.history.forget_speed();
  return start;
}

ColumnWatch for_kernel(ColumnReport* report, char* memory, uint16_t stamp) {
  void* const history = memory != nullptr ? memory + kTotalsBytes : nullptr;
  return {history, memory, report, &reports.others()->overflow_signal, stamp};
}

void launch_look(Watch& watch, const NormColumns& norm) {
  // So that no Python runs under the lock, no mode may see a copy of the parameters.
  const c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor weight = aligned_param(norm.weight), bias = aligned_param(norm.bias);
  const ColumnLookParams params{
      static_cast<int32_t>(norm.cols),
      to_dtype(norm.x_dtype),
      to_dtype(norm.y_dtype),
      norm.weight_offset,
      to_param(weight),
      to_param(bias),
      for_kernel(watch.report, find_memory(watch, norm), watch.history.look())};
  check_launch(launch_column_look(params, c10::cuda::getCurrentCUDAStream()));
}

int64_t least_of(int64_t a, int64_t b) { return a < 0 ? b : b < 0 ? a : std::min(a, b); }

// `generation`: of the code that is traced; -1: none is.
int64_t room_on_gpu(const NormColumns& norm, int generation) {
  std::unique_lock lock(mutex);
  const c10::cuda::CUDAGuard guard(norm.first().device());
  Watch* const watch = find_watch(norm, true);
  if (watch == nullptr) return kSaveInput;
  ParamsHistory& history = watch->history;
  const ParamsSeen params = params_of(watch->params);
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const bool traced = generation >= 0, fixed = traced || is_capturing();
  if (fixed) {
    history.see(params, in_backward);
  } else if (!history.chooses(params, newest_report(*watch), in_backward)) {
    return watch->room;
  }
  const auto sync_mode = c10::cuda::warning_state().get_sync_debug_mode();
  if (!fixed) watch->room = kSaveInput;  // unless all below goes well
  const bool can_wait = !is_capturing() && sync_mode != c10::cuda::SyncDebugMode::L_ERROR;
  if (can_wait && (traced || !history.covers(newest_report(*watch), false))) {
    launch_look(*watch, norm);
    lock.unlock();  // other threads may have to launch what the stream waits for
    c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream());
    lock.lock();
  }
  const Report report = newest_report(*watch);
  // Where nothing is known all columns may be lost.
  const int64_t at_risk = history.covers(report, false) ? report.at_risk : norm.cols;
  const int64_t room = room_for(at_risk, norm.cols, c10::elementSize(norm.x_dtype), fixed);
  if (!fixed) watch->room = room;
  if (traced) {
    // Code of an earlier generation, which had less, is not called again.
    const int before = std::exchange(watch->generation, generation);
    if (before >= 0 && before != generation) watch->least_room = watch->captured_room = -1;
  }
  return room;
}

bool is_near_its_room(const Watch& watch) {
  const int64_t room = least_of(watch.least_room, watch.captured_room);
  return room >= 0 && is_near(newest_report(watch).at_risk, room, watch.cols);
}

// Before an optimizer's step: which devices have reports to be waited for.
std::set<c10::DeviceIndex> devices_to_wait_for() {
  const std::lock_guard lock(mutex);
  std::set<c10::DeviceIndex> devices;
  if (reports.owners.empty() || is_capturing()) return devices;
  for (auto& [report, owner] : reports.owners) {
    if (owner.watch == nullptr) continue;
    Watch& watch = *owner.watch;
    watch.history.see(params_of(watch.params), false);
    watch.waits =
        least_of(watch.least_room, watch.captured_room) >= 0 &&
        (is_near_its_room(watch) || !watch.history.covers(newest_report(watch), watch.captured));
    if (watch.waits) devices.insert(watch.device);
  }
  return devices;
}
// And when that is done.
void settle_all() {
  const std::lock_guard lock(mutex);
  if (reports.owners.empty() || is_capturing()) return;
  for (auto& [report, owner] : reports.owners) {
    if (owner.watch == nullptr) continue;
    Watch& watch = *owner.watch;
    if (std::exchange(watch.waits, false)) watch.history.waited();
    if (watch.fixed && is_near_its_room(watch)) {
      compile_anew = true;
      watch.fixed = false;  // until such a call comes again
    }
    watch.least_room = -1;
  }
}

// What kernels signalled. Waits, where there is anything, so that all is known.
std::vector<Overflow> take_overflows() {
  std::unique_lock lock(mutex);
  if (reports.others_ == nullptr) return {};
  volatile uint32_t* const signal = &reports.others_->overflow_signal;
  if (*signal == 0) return {};
  lock.unlock();  // as in room_on_gpu()
  if (!is_capturing()) (void)cudaDeviceSynchronize();
  lock.lock();
  *signal = 0;
  std::vector<Overflow> overflows;
  for (auto& [report, owner] : reports.owners) {
    volatile uint32_t* const columns = &report->overflow;
    if (*columns == 0) continue;
    std::get<int64_t>(owner.overflow) = *columns;
    overflows.push_back(owner.overflow);
    *columns = 0;
    if (owner.watch != nullptr) owner.watch->history.doubt();
  }
  return overflows;
}

#endif  // FUSED_NORM_WITH_CUDA

// What does not fit is named by the operator.
int64_t find_room(const NormColumns& norm, int generation) {
  const Tensor& param = norm.first();
  for (const Tensor& t : {norm.weight, norm.bias}) {
    if (t.defined() && (t.layout() != at::kStrided || !t.is_floating_point() ||
                        t.numel() != norm.cols || t.device() != param.device())) {
      return kSaveInput;
    }
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (param.is_cuda()) return room_on_gpu(norm, generation);
#endif
  if (!param.is_cpu()) return kSaveInput;
  // A call on a CPU looks at its parameters. On a GPU that would be a wait.
  const auto flat = [](const Tensor& t) { return t.defined() ? t.reshape({-1}) : t; };
  const Tensor lost = cpu::lost_columns(flat(norm.weight), flat(norm.bias), norm.weight_offset,
                                        norm.cols, norm.x_dtype, norm.y_dtype, /*precise=*/true);
  return room_for(lost.numel(), norm.cols, c10::elementSize(norm.x_dtype), generation >= 0);
}

}  // namespace

int64_t choose_room(const NormColumns& norm) {
  return norm.first().defined() ? find_room(norm, -1) : 0;
}

int64_t traced_room(const NormColumns& norm, int generation, bool looks) {
  if (!norm.first().defined()) return 0;
  {
    const std::lock_guard lock(mutex);
    Norms* const norms = norms_of(norm.first(), true);
    if (norms == nullptr) return kSaveInput;
    if (norms->first_generation < 0) norms->first_generation = generation;
    if (generation - norms->first_generation >= kLastGeneration) return kSaveInput;
  }
  return looks ? find_room(norm, generation) : 0;
}

void note_listing(int64_t listed, int64_t room, int64_t cols) {
  if (is_near(listed, room, cols)) compile_anew = true;
}

bool before_optimizer_step() {
#ifdef FUSED_NORM_WITH_CUDA
  for (const c10::DeviceIndex device : devices_to_wait_for()) {
    const c10::cuda::CUDAGuard guard(device);
    c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream(device));
  }
  settle_all();
#endif
  const bool anew = compile_anew.exchange(false);
  check_overflow();  // has code compiled anew by itself
  return anew;
}

void after_optimizer_step() {
#ifdef FUSED_NORM_WITH_CUDA
  const std::lock_guard lock(mutex);
  for (auto& [report, owner] : reports.owners) {
    if (owner.watch != nullptr) owner.watch->history.after_step(params_of(owner.watch->params));
  }
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
  if (const auto overflows = take_overflows(); !overflows.empty()) raise_overflow(overflows);
#endif
}

#ifdef FUSED_NORM_WITH_CUDA
ColumnWatch watch_backward(const NormColumns& norm, bool from_output, int64_t room) {
  if (!norm.first().defined()) return {};
  const std::lock_guard lock(mutex);
  if (!from_output && reports.owners.empty()) return {};
  Watch* const watch = find_watch(norm, from_output);
  if (watch == nullptr)
    return from_output ? for_kernel(reports.others(), nullptr, 0) : ColumnWatch{};
  watch->captured |= is_capturing();
  if (from_output) {
    int64_t& least = is_capturing() ? watch->captured_room : watch->least_room;
    least = least_of(least, room);
    watch->fixed |= room > 0 && room != watch->room;
  }
  char* const memory = find_memory(*watch, norm);
  return for_kernel(watch->report, memory, watch->history.backward(params_of(watch->params)));
}
#endif

}  // namespace fused_norm::ops
