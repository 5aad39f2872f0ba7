// On the CPU a call looks at its parameters. On a GPU that would be a wait, so that a call relies
// on what backward passes reported (core/norm/columns.h).
//
// What is known of a norm hangs on its weight's TensorImpl, or its bias's if it has no weight, or
// that of the tensor of which these are views (FSDP's flat parameters), and goes with it. A weak
// reference would do too, but stands in the way of torch.utils.swap_tensors().
#include "ops/column_watch.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <unordered_map>

#include "cpu/norm.h"
#include "ops/rows.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include "ops/device.h"
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;

std::function<std::string(const std::vector<Overflow>&)>* overflow_message = nullptr;
std::atomic<bool> compile_anew = false;
thread_local int eager_calls = 0;

RoomLimits limits_of(const NormColumns& norm) {
  return room_limits(norm.cols, static_cast<int>(c10::elementSize(norm.x_dtype)));
}

const Tensor& first_param(const NormColumns& norm) {
  return norm.weight.defined() ? norm.weight : norm.bias;
}

// What does not fit is named by the operator.
bool fits(const NormColumns& norm) {
  for (const Tensor& t : {norm.weight, norm.bias}) {
    if (t.defined() && (t.layout() != at::kStrided || !t.is_floating_point() ||
                        t.numel() != norm.cols || t.device() != first_param(norm).device())) {
      return false;
    }
  }
  return true;
}

int64_t count_on_cpu(const NormColumns& norm) {
  const auto flat = [](const Tensor& t) { return t.defined() ? t.reshape({-1}) : t; };
  return cpu::lost_columns(flat(norm.weight), flat(norm.bias), norm.weight_offset, norm.cols,
                           norm.x_dtype, norm.y_dtype, /*precise=*/true)
      .numel();
}

std::mutex mutex;  // guards what follows; no Python runs under it
#ifdef FUSED_NORM_WITH_CUDA
struct Watch;
void forget_watches(std::vector<std::unique_ptr<Watch>>& watches);
#else
struct Watch {};
void forget_watches(std::vector<std::unique_ptr<Watch>>&) {}
#endif

// Hangs on a parameter; other tensors on the same memory, detach() and .data, do not inherit it.
struct Norms : c10::BackendMeta {
  uint64_t id;
  int first_generation = -1;  // of compiled code that knows it
  std::vector<std::unique_ptr<Watch>> watches;

  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
  ~Norms() override;
};
std::unordered_map<uint64_t, c10::TensorImpl*>& known_params() {  // by the id of their Norms
  static auto* const params = new std::unordered_map<uint64_t, c10::TensorImpl*>;
  return *params;
}

// Every parameter that is remembered must be one that comes again: a leaf, or a view of a leaf.
Tensor owner_of(const Tensor& param) {
  if (!param.defined() || param.is_leaf()) return param;
  if (param.is_view() && param._base().is_leaf()) return Tensor(param._base());
  return {};
}

// Null when the tensor already carries something of a backend's own.
Norms* norms_of(const Tensor& owner, bool create) {
  static uint64_t next_id = 1;
  c10::TensorImpl* const impl = owner.unsafeGetTensorImpl();
  if (c10::BackendMeta* const meta = impl->get_backend_meta()) return dynamic_cast<Norms*>(meta);
  if (!create) return nullptr;
  auto norms = c10::make_intrusive<Norms>();
  norms->id = next_id++;
  known_params()[norms->id] = impl;
  impl->set_backend_meta(norms);
  return norms.get();
}

#ifdef FUSED_NORM_WITH_CUDA

// Mapped host memory that kernels write. Never given back: a captured graph may write it at any
// time. Report 0 has the overflow signal.
class ReportArena {
 public:
  struct Slot {
    ColumnReport *host, *device;
    uint32_t index;
  };

  Slot take() {
    // Slots rest for a while, as kernels may still be on their way to them.
    constexpr size_t kResting = 1024;
    if (free_.size() <= kResting) grow();
    const Slot slot = at(free_.front());
    free_.pop_front();
    *slot.host = {};
    return slot;
  }
  void give_back(const Slot& slot) { free_.push_back(slot.index); }

  Slot at(uint32_t index) {
    if (blocks_.empty()) grow();
    const auto& block = blocks_[index / kSlots];
    return {block.host + index % kSlots, block.device + index % kSlots, index};
  }
  bool empty() const { return blocks_.empty(); }

 private:
  static constexpr uint32_t kSlots = 4096;
  struct Block {
    ColumnReport *host, *device;
  };

  void grow() {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    Block block;
    void* memory;
    C10_CUDA_CHECK(cudaHostAlloc(&memory, kSlots * sizeof(ColumnReport),
                                 cudaHostAllocMapped | cudaHostAllocPortable));
    block.host = static_cast<ColumnReport*>(memory);
    std::fill_n(block.host, kSlots, ColumnReport{});
    C10_CUDA_CHECK(cudaHostGetDevicePointer(&memory, memory, 0));
    block.device = static_cast<ColumnReport*>(memory);
    const uint32_t first = static_cast<uint32_t>(blocks_.size()) * kSlots;
    blocks_.push_back(block);
    for (uint32_t i = blocks_.size() == 1 ? 1 : 0; i < kSlots; ++i) free_.push_back(first + i);
  }

  std::vector<Block> blocks_;
  std::deque<uint32_t> free_;
};

// All that is known of one norm.
struct Watch {
  NormColumns norm;  // without its tensors
  uint64_t bias_id;
  int64_t offset, bias_offset;  // of views
  c10::TensorImpl* weight;      // that this hangs on
  c10::Device device = c10::kCPU;

  ParamsHistory history;
  int64_t room = kSaveInput;  // of the next eager call
  int64_t least_room = -1;    // of the backward calls since the last step; -1: none
  bool waits = false;         // the step is waiting for its report
  bool traced = false, captured = false;

  ReportArena::Slot slot;
  Tensor memory;  // ColumnWatch::history, and totals
  cudaStream_t stream = nullptr;
  bool memory_captured = false;
};

struct Registry {
  ReportArena arena;
  std::unordered_map<uint32_t, Watch*> watches;   // by slot
  std::unordered_map<uint32_t, Overflow> owners;  // of every slot ever used, for messages
  std::vector<Tensor> immortal;                   // what captured graphs write
};

Registry& registry() {
  static auto* const registry = new Registry;  // outlives the tensors that it knows
  return *registry;
}

void forget_watches(std::vector<std::unique_ptr<Watch>>& watches) {
  for (const auto& watch : watches) {
    registry().watches.erase(watch->slot.index);
    if (!watch->captured) registry().arena.give_back(watch->slot);
  }
}

// Null when the norm cannot be remembered, or is not known and not to be created.
Watch* find_watch(const NormColumns& norm, bool create) {
  constexpr size_t kMostWatches = 16;  // beyond them its bias or offset is another at each call
  const Tensor& param = first_param(norm);
  const Tensor owner = owner_of(param);
  if (!owner.defined()) return nullptr;
  uint64_t bias_id = 0;
  if (norm.weight.defined() && norm.bias.defined()) {
    const Tensor bias_owner = owner_of(norm.bias);
    const Norms* const bias = bias_owner.defined() ? norms_of(bias_owner, create) : nullptr;
    if (bias == nullptr) return nullptr;
    bias_id = bias->id;
  }
  Norms* const norms = norms_of(owner, create);
  if (norms == nullptr) return nullptr;
  const int64_t bias_offset = bias_id != 0 ? norm.bias.storage_offset() : 0;
  for (const auto& watch : norms->watches) {
    const NormColumns& known = watch->norm;
    if (watch->bias_id == bias_id && watch->offset == param.storage_offset() &&
        watch->bias_offset == bias_offset && known.weight_offset == norm.weight_offset &&
        known.cols == norm.cols && known.x_dtype == norm.x_dtype && known.y_dtype == norm.y_dtype &&
        watch->device == param.device()) {
      return watch.get();
    }
  }
  if (!create || norms->watches.size() >= kMostWatches) return nullptr;
  auto watch = std::make_unique<Watch>();
  watch->norm = {{}, {}, norm.weight_offset, norm.cols, norm.x_dtype, norm.y_dtype};
  watch->bias_id = bias_id;
  watch->offset = param.storage_offset();
  watch->bias_offset = bias_offset;
  watch->weight = owner.unsafeGetTensorImpl();
  watch->device = param.device();
  watch->slot = registry().arena.take();
  registry().watches[watch->slot.index] = watch.get();
  registry().owners[watch->slot.index] = overflow_of(norm, 0);
  norms->watches.push_back(std::move(watch));
  return norms->watches.back().get();
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

ColumnCounts read_report(const Watch& watch) {
  return unpack_report(*static_cast<const volatile uint64_t*>(&watch.slot.host->report));
}

ParamsSeen params_of(const Watch& watch) {
  ParamsSeen seen;
  auto add = [&](c10::TensorImpl* impl, const void** data) {
    *data = impl->storage().data();
    if (!impl->is_inference()) seen.version += impl->version_counter().current_version();
  };
  add(watch.weight, &seen.weight);
  const auto bias = known_params().find(watch.bias_id);
  if (bias != known_params().end()) add(bias->second, &seen.bias);
  return seen;
}

// So that no Python runs under the lock, no mode may see a look's operators.
struct BelowPython {
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// Memory of the default pool, for use on `stream`. The first calls of code that is compiled into
// CUDA graphs allocate from a graph's pool, which must not hold what outlives them: another thread
// does not.
Tensor empty_in_default_pool(int64_t size, const at::TensorOptions& options,
                             c10::cuda::CUDAStream stream) {
  Tensor memory;
  std::exception_ptr error;
  std::thread([&] {
    try {
      const c10::cuda::CUDAGuard guard(stream.device());
      memory = at::empty({size}, options);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  const auto owner = c10::cuda::getDefaultCUDAStream(stream.device_index());
  if (owner != stream) {
    at::cuda::CUDAEvent freed;  // by whoever had this memory before
    freed.record(owner);
    freed.block(stream);
    memory.record_stream(stream);
  }
  return memory;
}

// Memory for the looks of one stream: two could not share it. A captured graph keeps what it has.
void find_memory(Watch& watch, const NormColumns& norm, cudaStream_t stream) {
  const bool capturing = is_capturing();
  if (watch.memory.defined() && (capturing || !watch.memory_captured) &&
      (capturing || watch.stream == stream)) {
    if (capturing && !watch.memory_captured) registry().immortal.push_back(watch.memory);
    watch.memory_captured |= capturing;
    return;
  }
  if (capturing) return;  // only overflow is reported
  const BelowPython below_python;
  const auto options = first_param(norm).options().requires_grad(false).dtype(
      norm.x_dtype == at::kDouble ? at::kDouble : at::kFloat);
  const int64_t size = (norm.bias.defined() ? 4 : 2) * norm.cols;
  const int64_t totals = kTotalsBytes / static_cast<int64_t>(options.dtype().itemsize());
  watch.memory = empty_in_default_pool((size + totals - 1) / totals * totals + totals, options,
                                       c10::cuda::getCurrentCUDAStream());
  watch.memory.fill_(NAN);
  watch.memory.slice(0, watch.memory.numel() - totals).zero_();
  watch.history.restart();
  watch.stream = stream;
  watch.memory_captured = false;
}

ColumnWatch device_watch(const Watch& watch, uint16_t stamp) {
  ColumnWatch out{};
  if (watch.memory.defined()) {
    out.history = watch.memory.mutable_data_ptr();
    out.totals = static_cast<char*>(out.history) + watch.memory.nbytes() - kTotalsBytes;
  }
  out.report = watch.slot.device;
  out.overflow_signal = &registry().arena.at(0).device->overflow_signal;
  out.stamp = stamp;
  return out;
}

// Launches a look and waits for it.
ColumnCounts look(Watch& watch, const NormColumns& norm) {
  const BelowPython below_python;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  find_memory(watch, norm, stream);
  const Tensor weight = aligned_param(norm.weight), bias = aligned_param(norm.bias);
  ColumnLookParams params{};
  params.cols = static_cast<int32_t>(norm.cols);
  params.x_dtype = to_dtype(norm.x_dtype);
  params.y_dtype = to_dtype(norm.y_dtype);
  params.weight_offset = norm.weight_offset;
  params.weight = to_param(weight);
  params.bias = to_param(bias);
  params.watch = device_watch(watch, watch.history.stamp());
  check_launch(launch_column_look(params, stream));
  c10::cuda::stream_synchronize(stream);
  const ColumnCounts counts = read_report(watch);
  watch.history.looked(counts);
  watch.room = chosen_room(counts.lost, limits_of(norm));
  return counts;
}

bool can_wait() {
  return c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_ERROR;
}

bool requires_grad(const Tensor& param) { return param.defined() && param.requires_grad(); }

int64_t choose_on_gpu(const NormColumns& norm) {
  const std::lock_guard lock(mutex);
  const c10::cuda::CUDAGuard guard(first_param(norm).device());
  Watch* const watch = find_watch(norm, true);
  if (watch == nullptr) return kSaveInput;
  ParamsHistory& history = watch->history;
  history.see(params_of(*watch));
  if (is_capturing()) {
    watch->captured = true;
    const ColumnCounts counts = read_report(*watch);
    return history.must_look() || !history.is_recent(counts)
               ? kSaveInput
               : fixed_room(counts.at_risk, limits_of(norm), 0);
  }
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  auto choice = history.choose(in_backward, requires_grad(norm.weight) || requires_grad(norm.bias));
  if (choice == ParamsHistory::Choice::kKeep) return watch->room;
  const ColumnCounts counts = read_report(*watch);
  if (choice == ParamsHistory::Choice::kFromReport && history.is_recent(counts)) {
    watch->room = chosen_room(counts.at_risk, limits_of(norm));
  } else {
    if (can_wait()) {
      look(*watch, norm);
    } else {
      watch->room = kSaveInput;
    }
  }
  return watch->room;
}

// What kernels signalled. Waits, where there is anything, so that all is known.
std::vector<Overflow> take_overflows() {
  const std::lock_guard lock(mutex);
  Registry& all = registry();
  if (all.arena.empty()) return {};
  volatile uint32_t* const signal = &all.arena.at(0).host->overflow_signal;
  if (*signal == 0) return {};
  if (!is_capturing()) (void)cudaDeviceSynchronize();
  *signal = 0;
  std::vector<Overflow> overflows;
  for (auto& [index, owner] : all.owners) {
    volatile uint32_t* const columns = &all.arena.at(index).host->overflow;
    if (*columns == 0) continue;
    overflows.push_back({owner.weight, owner.description, *columns});
    *columns = 0;
    const auto watch = all.watches.find(index);
    if (watch != all.watches.end()) watch->second->history.forget();
  }
  return overflows;
}

// Whether the host must wait before an optimizer's step for the sake of this norm.
bool must_wait(Watch& watch) {
  if (watch.least_room < 0) return false;
  watch.history.see(params_of(watch));
  const bool fixed = watch.traced || watch.captured;
  const ColumnCounts counts = read_report(watch);
  const bool near = fixed ? is_near(counts.at_risk, watch.least_room, watch.norm.cols)
                          : counts.at_risk > watch.least_room;
  return near || watch.history.is_doubtful(counts, fixed, watch.captured);
}

// Before the step, with the report that it waited for, if it did.
void leave(Watch& watch) {
  if (watch.waits) watch.history.verified();
  watch.waits = false;
  if (watch.traced && watch.least_room >= 0 &&
      is_near(read_report(watch).at_risk, watch.least_room, watch.norm.cols)) {
    compile_anew = true;
    watch.traced = false;  // until it is traced again
  }
  if (!watch.captured) watch.least_room = -1;
}

#endif  // FUSED_NORM_WITH_CUDA

Norms::~Norms() {
  const std::lock_guard lock(mutex);
  known_params().erase(id);
  forget_watches(watches);
}

}  // namespace

void set_overflow_message(std::function<std::string(const std::vector<Overflow>&)> message) {
  overflow_message = new auto(std::move(message));  // outlives the interpreter, which it may call
}

Overflow overflow_of(const NormColumns& norm, int64_t columns) {
  const Tensor& param = first_param(norm);
  std::ostringstream text;
  text << "a norm with " << (norm.weight.defined() ? "weight" : "bias") << " of shape "
       << param.sizes() << " and dtype " << param.scalar_type() << " on " << param.device();
  return {param.unsafeGetTensorImpl(), text.str(), columns};
}

void raise_overflow(const std::vector<Overflow>& overflows) {
  TORCH_CHECK(false, overflow_message != nullptr ? (*overflow_message)(overflows)
                                                 : overflows.at(0).description);
}

void check_overflow() {
#ifdef FUSED_NORM_WITH_CUDA
  const auto overflows = take_overflows();
  if (!overflows.empty()) raise_overflow(overflows);
#endif
}

EagerCall::EagerCall() { ++eager_calls; }
EagerCall::~EagerCall() { --eager_calls; }

int64_t choose_room(const NormColumns& norm) {
  if (!norm.weight.defined() && !norm.bias.defined()) return 0;
  if (!fits(norm)) return kSaveInput;
  const Tensor& param = first_param(norm);
  if (param.is_cpu()) {
    const int64_t columns = count_on_cpu(norm);  // exactly what the call will list
    return columns > limits_of(norm).most ? kSaveInput : columns;
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (param.is_cuda()) return choose_on_gpu(norm);
#endif
  return kSaveInput;
}

int64_t traced_room(const NormColumns& norm, int generation, bool looks) {
  if (!norm.weight.defined() && !norm.bias.defined()) return 0;
  if (!fits(norm)) return kSaveInput;
  const Tensor& param = first_param(norm);
  const Tensor owner = owner_of(param);
  const std::lock_guard lock(mutex);
  Norms* const norms = owner.defined() ? norms_of(owner, true) : nullptr;
  if (norms == nullptr) return kSaveInput;
  if (norms->first_generation < 0) norms->first_generation = generation;
  generation -= norms->first_generation;
  if (generation >= kLastGeneration) return kSaveInput;
  if (!looks) return 0;
  if (param.is_cpu()) return fixed_room(count_on_cpu(norm), limits_of(norm), generation);
#ifdef FUSED_NORM_WITH_CUDA
  if (param.is_cuda()) {
    const c10::cuda::CUDAGuard guard(param.device());
    Watch* const watch = find_watch(norm, true);
    if (watch == nullptr || is_capturing() || !can_wait()) return kSaveInput;
    watch->history.see(params_of(*watch));
    return fixed_room(look(*watch, norm).at_risk, limits_of(norm), generation);
  }
#endif
  return kSaveInput;
}

void note_listing(const NormColumns& norm, int64_t room, int64_t listed) {
  if (eager_calls > 0) return;
  if (listed >= 0) {
    if (is_near(listed, room, norm.cols)) compile_anew = true;
    return;
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (!norm.weight.defined() && !norm.bias.defined()) return;
  const std::lock_guard lock(mutex);
  if (Watch* const watch = find_watch(norm, true)) watch->traced = true;
#endif
}

bool before_optimizer_step() {
#ifdef FUSED_NORM_WITH_CUDA
  std::vector<c10::Device> devices;
  auto for_each_watch = [](auto run) {
    const std::lock_guard lock(mutex);
    if (registry().watches.empty() || is_capturing()) return;
    for (const auto& [index, watch] : registry().watches) run(*watch);
  };
  for_each_watch([&](Watch& watch) {
    watch.waits = must_wait(watch);
    if (watch.waits && std::find(devices.begin(), devices.end(), watch.device) == devices.end())
      devices.push_back(watch.device);
  });
  for (const c10::Device device : devices)
    c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream(device.index()));
  for_each_watch(leave);
  check_overflow();
#endif
  return compile_anew.exchange(false);
}

void after_optimizer_step() {
#ifdef FUSED_NORM_WITH_CUDA
  const std::lock_guard lock(mutex);
  for (const auto& [index, watch] : registry().watches)
    watch->history.after_step(params_of(*watch));
#endif
}

#ifdef FUSED_NORM_WITH_CUDA
ColumnWatch watch_backward(const NormColumns& norm, bool from_output, int64_t room,
                           cudaStream_t stream) {
  if (!norm.weight.defined() && !norm.bias.defined()) return {};
  const std::lock_guard lock(mutex);
  if (!from_output && registry().arena.empty()) return {};
  if (Watch* const watch = find_watch(norm, from_output)) {
    watch->history.see(params_of(*watch));
    watch->captured |= is_capturing();
    if (from_output) {
      watch->least_room = watch->least_room < 0 ? room : std::min(watch->least_room, room);
    }
    find_memory(*watch, norm, stream);
    return device_watch(*watch, watch->history.backward());
  }
  if (!from_output) return {};
  // One that cannot be remembered still reports its overflow.
  const auto slot = registry().arena.take();
  registry().owners[slot.index] = overflow_of(norm, 0);
  registry().owners[slot.index].weight = nullptr;
  if (!is_capturing()) registry().arena.give_back(slot);
  ColumnWatch out{};
  out.report = slot.device;
  out.overflow_signal = &registry().arena.at(0).device->overflow_signal;
  return out;
}
#endif

}  // namespace fused_norm::ops
