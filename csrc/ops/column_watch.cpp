// On the CPU a call looks at its parameters. On a GPU that would be a wait, so that a call relies
// on what backward passes reported (core/norm/columns.h): the number of columns that might stop
// being recoverable within the next few updates. How many updates lie between report and call is
// known from stamps. A look that waits is taken when
//   - the parameters are new,
//   - their memory is another one, until that has become a habit (FSDP),
//   - their version counters moved by an amount not seen before, or without an optimizer's step
//     (load_state_dict, pruning); an optimizer's step is a move of its own where they stay (fused
//     optimizers do not move them),
//   - they move without either (updates written through .data), for a while.
// A choice stays until the next move, also where other memory is a habit and optimizers are known
// to make the moves; and in a checkpoint's second forward pass, which so saves what its first did.
//
// What is known of a norm hangs on its weight's TensorImpl, or its bias's if it has no weight, or
// that of the tensor of which these are views (FSDP's flat parameters), and goes with it. A weak
// reference would do too, but stands in the way of torch.utils.swap_tensors().
#include "ops/column_watch.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <sstream>
#include <vector>

#include "cpu/norm.h"
#include "ops/rows.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/full.h>
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

std::mutex mutex;                         // guards all but optimizer_steps
std::optional<Overflow> pending_on_host;  // on the CPU, or found in a report
std::atomic<uint64_t> optimizer_steps = 0;

int64_t element_size(ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

// Beyond so many columns the side tensor takes more than half of the saving.
int64_t most_listed(const NormColumns& norm) {
  const int64_t side = norm.x_dtype == at::kDouble ? 8 : 4;
  return std::min(norm.cols * element_size(norm.x_dtype) / (2 * side), kMostRoom);
}

int64_t round_room(int64_t columns, int64_t cols) { return std::min((columns + 3) / 4 * 4, cols); }

std::string describe(const NormColumns& norm) {
  std::ostringstream text;
  const Tensor& param = norm.weight.defined() ? norm.weight : norm.bias;
  text << "a norm with " << (norm.weight.defined() ? "weight" : "bias") << " of shape "
       << param.sizes() << " and dtype " << param.scalar_type() << " on " << param.device();
  return text.str();
}

#ifdef FUSED_NORM_WITH_CUDA

constexpr int kPossibleLooks = 8;  // at parameters that move without their version counters
constexpr int kStrangeSwaps = 2;

int64_t room_for(int64_t columns, const NormColumns& norm) {
  return columns > most_listed(norm) ? kSaveInput : round_room(columns, norm.cols);
}

// Mapped host memory that kernels write. Never given back: a captured graph may write it at any
// time. Slot 0 holds the overflow signal, and the reports of norms without a watch.
class ReportArena {
 public:
  struct Slot {
    ColumnReport* host;
    ColumnReport* device;
    uint32_t index;
  };

  Slot take() {
    // Slots rest for a while, as kernels may still be on their way to them.
    constexpr size_t kResting = 1024;
    if (free_.size() <= kResting) grow();
    const uint32_t index = free_.front();
    free_.pop_front();
    const Slot slot = at(index);
    *slot.host = {};
    return slot;
  }

  void give_back(uint32_t index) { free_.push_back(index); }

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

struct Report {
  bool valid, moved;
  uint16_t stamp;
  int64_t at_risk[kHorizons];
  int64_t lost;
};

// All that is known of one norm.
struct Watch {
  // Which norm: the weight hangs on what owns this.
  uint64_t bias_id;
  int64_t offset, bias_offset;  // of views
  double weight_offset;
  int64_t cols;
  ScalarType x_dtype, y_dtype;
  c10::Device device = c10::kCPU;

  ReportArena::Slot slot;
  Tensor history;
  cudaStream_t history_stream = nullptr;
  bool captured = false;

  // The choice, and the parameters for which it was made.
  bool chosen = false;
  int64_t room = kSaveInput;
  const void *weight_data = nullptr, *bias_data = nullptr;
  uint32_t version = 0;
  uint16_t stamp = 0;

  // What is known of how they change: the moves of the version counters, twice that plus one with
  // an optimizer's step.
  std::array<uint64_t, 4> known_moves{};
  int moves = 0;
  bool optimized = false;  // some came with an optimizer's step
  uint64_t optimizer_steps = 0;
  int swaps = 0, looks = 0;
  bool moves_unseen = true;  // without the version counters
  bool backward_ran = false;
  int64_t outstanding = 0;  // forward calls whose backward call did not come yet
};

struct Registry {
  ReportArena arena;
  uint64_t next_id = 1;
  // Of every slot ever used: whose it is, for messages.
  struct Owner {
    const void* weight;
    std::string description;
    Watch* watch;  // null when it is gone
  };
  std::vector<Owner> owners;
  std::vector<Tensor> immortal;  // what captured graphs write
};

Registry& registry() {
  static auto* const registry = new Registry;  // outlives the tensors that it knows
  return *registry;
}

// Hangs on a parameter; other tensors on the same memory, detach() and .data, do not inherit it.
struct Norms : c10::BackendMeta {
  uint64_t id;
  std::vector<std::unique_ptr<Watch>> watches;

  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
  ~Norms() override {
    const std::lock_guard lock(mutex);
    for (const auto& watch : watches) {
      registry().owners[watch->slot.index].watch = nullptr;
      if (!watch->captured) registry().arena.give_back(watch->slot.index);
    }
  }
};

// Every parameter that is remembered must be one that comes again: a leaf, or a view of a leaf.
Tensor owner_of(const Tensor& param) {
  if (!param.defined() || param.is_leaf()) return param;
  if (param.is_view() && param._base().is_leaf()) return Tensor(param._base());
  return {};
}

// Null when the tensor already carries something of a backend's own.
Norms* norms_of(const Tensor& owner, bool create) {
  c10::TensorImpl* const impl = owner.unsafeGetTensorImpl();
  if (c10::BackendMeta* const meta = impl->get_backend_meta()) return dynamic_cast<Norms*>(meta);
  if (!create) return nullptr;
  auto norms = c10::make_intrusive<Norms>();
  norms->id = registry().next_id++;
  impl->set_backend_meta(norms);
  return norms.get();
}

// Null when the norm cannot be remembered, or is not known and not to be created.
Watch* find_watch(const NormColumns& norm, bool create) {
  constexpr size_t kMostWatches = 16;  // beyond them its bias or offset is another at each call
  const Tensor& param = norm.weight.defined() ? norm.weight : norm.bias;
  const Tensor owner = owner_of(param);
  if (!owner.defined()) return nullptr;
  uint64_t bias_id = 0;
  if (norm.weight.defined() && norm.bias.defined()) {
    const Tensor bias_owner = owner_of(norm.bias);
    if (!bias_owner.defined()) return nullptr;
    const Norms* const bias = norms_of(bias_owner, create);
    if (bias == nullptr) return nullptr;
    bias_id = bias->id;
  }
  Norms* const norms = norms_of(owner, create);
  if (norms == nullptr) return nullptr;
  const int64_t bias_offset = bias_id != 0 ? norm.bias.storage_offset() : 0;
  for (const auto& watch : norms->watches) {
    if (watch->bias_id == bias_id && watch->offset == param.storage_offset() &&
        watch->bias_offset == bias_offset && watch->weight_offset == norm.weight_offset &&
        watch->cols == norm.cols && watch->x_dtype == norm.x_dtype &&
        watch->y_dtype == norm.y_dtype && watch->device == param.device()) {
      return watch.get();
    }
  }
  if (!create || norms->watches.size() >= kMostWatches) return nullptr;
  auto watch = std::make_unique<Watch>();
  watch->bias_id = bias_id;
  watch->offset = param.storage_offset();
  watch->bias_offset = bias_offset;
  watch->weight_offset = norm.weight_offset;
  watch->cols = norm.cols;
  watch->x_dtype = norm.x_dtype;
  watch->y_dtype = norm.y_dtype;
  watch->device = param.device();
  watch->slot = registry().arena.take();
  auto& owners = registry().owners;
  if (owners.size() <= watch->slot.index) owners.resize(watch->slot.index + 1);
  owners[watch->slot.index] = {param.unsafeGetTensorImpl(), describe(norm), watch.get()};
  norms->watches.push_back(std::move(watch));
  return norms->watches.back().get();
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

Report read_report(const Watch& watch) {
  const ColumnReport* const at = watch.slot.host;
  const uint64_t word = *static_cast<const volatile uint64_t*>(&at->report);
  Report report;
  report.valid = word >> 62 & 1;
  report.moved = word >> 61 & 1;
  report.stamp = static_cast<uint16_t>(word >> kHorizons * kCountBits);
  for (int h = 0; h < kHorizons; ++h) {
    report.at_risk[h] = static_cast<int64_t>(word >> h * kCountBits & ((1 << kCountBits) - 1));
  }
  report.lost = *static_cast<const volatile uint32_t*>(&at->lost);
  return report;
}

ColumnWatch device_watch(Watch& watch, cudaStream_t stream) {
  ColumnWatch out{};
  if (watch.history.defined()) {
    out.history = watch.history.mutable_data_ptr();
    out.totals = static_cast<char*>(out.history) + watch.history.nbytes() - kTotalsBytes;
    if (stream != watch.history_stream) {
      watch.history.record_stream(c10::cuda::getCurrentCUDAStream());
    }
  }
  out.report = watch.slot.device;
  out.overflow_signal = &registry().arena.at(0).device->overflow;
  out.signal = watch.slot.index;
  out.stamp = watch.stamp;
  return out;
}

void keep_for_graphs(Watch& watch) {
  if (watch.captured) return;
  watch.captured = true;
  if (watch.history.defined()) registry().immortal.push_back(watch.history);
}

// Launches a look and waits for it. Keeps to itself: under the lock no Python may run, so no mode
// sees its operators.
Report look(Watch& watch, const NormColumns& norm) {
  const c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (!watch.history.defined()) {
    const Tensor& param = norm.weight.defined() ? norm.weight : norm.bias;
    const auto options = param.options().requires_grad(false).dtype(
        norm.x_dtype == at::kDouble ? at::kDouble : at::kFloat);
    const int64_t size = (norm.bias.defined() ? 4 : 2) * norm.cols;
    const int64_t totals = kTotalsBytes / static_cast<int64_t>(options.dtype().itemsize());
    watch.history = at::full({(size + totals - 1) / totals * totals + totals}, NAN, options);
    watch.history.slice(0, watch.history.numel() - totals).zero_();
    watch.history_stream = stream;
  }
  const Tensor weight = aligned_param(norm.weight), bias = aligned_param(norm.bias);
  ColumnLookParams params{};
  params.cols = static_cast<int32_t>(norm.cols);
  params.x_dtype = to_dtype(norm.x_dtype);
  params.y_dtype = to_dtype(norm.y_dtype);
  params.weight_offset = norm.weight_offset;
  params.weight = to_param(weight);
  params.bias = to_param(bias);
  params.watch = device_watch(watch, stream);
  check_launch(launch_column_look(params, stream));
  c10::cuda::stream_synchronize(stream);
  return read_report(watch);
}

// Room for the columns that are at risk until the parameters of a call, from a report that was
// taken `lag` choices before it. More than are: the forecast may fall short.
int64_t room_from(const Report& report, int lag, const NormColumns& norm) {
  int h = 0;
  while (h < kHorizons && lag > horizon(h)) ++h;
  if (!report.valid || h == kHorizons) return kSaveInput;
  const int64_t columns = report.at_risk[h];
  if (columns == (1 << kCountBits) - 1 || columns > most_listed(norm)) return kSaveInput;
  return columns == 0 ? 0 : round_room(columns + columns / 8 + 4, norm.cols);
}

uint32_t version_of(const Tensor& param) {
  return param.defined() && !param.is_inference() ? static_cast<uint32_t>(param._version()) : 0;
}

bool requires_grad(const Tensor& param) { return param.defined() && param.requires_grad(); }

int64_t choose_on_gpu(const NormColumns& norm) {
  const Tensor& param = norm.weight.defined() ? norm.weight : norm.bias;
  const c10::cuda::CUDAGuard guard(param.device());
  Watch* const watch = find_watch(norm, true);
  if (watch == nullptr) return kSaveInput;
  const void* const weight_data = norm.weight.defined() ? norm.weight.const_data_ptr() : nullptr;
  const void* const bias_data = norm.bias.defined() ? norm.bias.const_data_ptr() : nullptr;
  const uint32_t version = version_of(norm.weight) + version_of(norm.bias);
  const bool swapped = weight_data != watch->weight_data || bias_data != watch->bias_data;
  const uint32_t step = version - watch->version;
  const uint64_t steps = optimizer_steps;  // once: another thread may take one meanwhile
  const bool optimized = steps != watch->optimizer_steps;
  const bool moved = step != 0 || optimized;
  const uint64_t move = uint64_t{step} << 1 | optimized;
  const auto known = watch->known_moves.begin();
  const auto known_end = known + std::min<size_t>(watch->moves, watch->known_moves.size());
  const bool strange_move =
      moved && ((watch->optimized && !optimized) || std::find(known, known_end, move) == known_end);
  if (is_capturing()) {
    keep_for_graphs(*watch);
    if (!watch->chosen || strange_move || (swapped && watch->swaps < kStrangeSwaps))
      return kSaveInput;
    const int64_t room = room_from(read_report(*watch), horizon(kHorizons - 1), norm);
    return room == kSaveInput ? kSaveInput : std::max(room, fixed_room(norm.cols));
  }

  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const bool stayed = !swapped && step == 0;
  const bool repeats = in_backward && watch->outstanding > 0 && (stayed || !optimized);
  const bool unmoved = !moved && (stayed ? watch->moves > 0 || !watch->backward_ran
                                         : watch->optimized && watch->swaps >= kStrangeSwaps);
  if (watch->chosen && (repeats || unmoved)) {
    if (!in_backward) ++watch->outstanding;
    return watch->room;
  }

  bool must_look = !watch->chosen || !watch->history.defined();
  if (watch->chosen && swapped) must_look |= ++watch->swaps <= kStrangeSwaps;
  if (watch->chosen && strange_move) {
    watch->known_moves[watch->moves++ % watch->known_moves.size()] = move;
    watch->optimized |= optimized;
    must_look = true;
  }
  Report report = read_report(*watch);
  if (report.valid) watch->moves_unseen |= report.moved;
  if (watch->moves == 0 && watch->moves_unseen &&
      (requires_grad(norm.weight) || requires_grad(norm.bias))) {
    must_look |= watch->looks++ < kPossibleLooks;
  }

  ++watch->stamp;
  const bool can_wait =
      c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_ERROR;
  if (must_look && can_wait) {
    report = look(*watch, norm);
    if (watch->chosen) watch->moves_unseen = report.moved;
    watch->room = room_for(report.lost, norm);
  } else if (must_look) {
    watch->room = kSaveInput;
  } else {
    const auto lag = static_cast<uint16_t>(watch->stamp - report.stamp);
    watch->room = room_from(report, lag, norm);
  }
  watch->chosen = true;
  watch->weight_data = weight_data;
  watch->bias_data = bias_data;
  watch->version = version;
  watch->optimizer_steps = steps;
  watch->backward_ran = false;
  watch->outstanding = in_backward ? 0 : 1;
  return watch->room;
}

// Moves what kernels signalled into pending_on_host.
void collect_overflow() {
  ReportArena& arena = registry().arena;
  if (pending_on_host.has_value() || arena.empty()) return;
  volatile uint32_t* const signal = &arena.at(0).host->overflow;
  const uint32_t index = *signal;
  if (index == 0) return;
  *signal = 0;
  ColumnReport* const report = arena.at(index).host;
  const auto& owner = registry().owners.at(index);
  pending_on_host = Overflow{owner.weight, owner.description, report->overflow};
  if (owner.watch != nullptr) owner.watch->chosen = false;
  report->overflow = 0;
}

#else
void collect_overflow() {}
#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

int64_t fixed_room(int64_t cols) { return round_room(std::max<int64_t>(16, cols / 256), cols); }

void note_optimizer_step() { ++optimizer_steps; }

std::optional<Overflow> take_overflow() {
  const std::lock_guard lock(mutex);
  collect_overflow();
  return std::exchange(pending_on_host, std::nullopt);
}

void check_overflow() {
  const std::optional<Overflow> overflow = take_overflow();
  TORCH_CHECK(
      !overflow.has_value(), overflow->description, " and memory_efficient=True had no room for ",
      overflow->columns,
      " column(s) whose weight became zero, or small beside the bias. The gradients of that "
      "backward pass are NaN: discard them. Compile anew with memory_efficient=False for "
      "this norm");
}

void report_overflow(const NormColumns& norm, int64_t columns) {
  const std::lock_guard lock(mutex);
  const Tensor& param = norm.weight.defined() ? norm.weight : norm.bias;
  pending_on_host = Overflow{param.unsafeGetTensorImpl(), describe(norm), columns};
}

int64_t choose_room(const NormColumns& norm) {
  const std::lock_guard lock(mutex);
  collect_overflow();
  if (pending_on_host.has_value()) return kOverflowPending;
  if (!norm.weight.defined() && !norm.bias.defined()) return 0;
  const Tensor& param = norm.weight.defined() ? norm.weight : norm.bias;
  // What does not fit is named by the operator.
  for (const Tensor& t : {norm.weight, norm.bias}) {
    if (t.defined() && (t.layout() != at::kStrided || !t.is_floating_point() ||
                        t.numel() != norm.cols || t.device() != param.device())) {
      return kSaveInput;
    }
  }
  if (param.is_cpu()) {
    const auto flat = [](const Tensor& t) { return t.defined() ? t.reshape({-1}) : t; };
    const Tensor lost = cpu::lost_columns(flat(norm.weight), flat(norm.bias), norm.weight_offset,
                                          norm.cols, norm.x_dtype, norm.y_dtype, /*precise=*/true);
    return lost.numel() > most_listed(norm) ? kSaveInput : lost.numel();
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (param.is_cuda()) return choose_on_gpu(norm);
#endif
  return kSaveInput;
}

#ifdef FUSED_NORM_WITH_CUDA
ColumnWatch watch_backward(const NormColumns& norm, bool from_output, cudaStream_t stream) {
  if (!norm.weight.defined() && !norm.bias.defined()) return {};
  const std::lock_guard lock(mutex);
  if (!from_output && registry().arena.empty()) return {};
  if (Watch* const watch = find_watch(norm, from_output)) {
    watch->backward_ran = true;
    watch->outstanding = std::max<int64_t>(0, watch->outstanding - 1);
    if (is_capturing()) keep_for_graphs(*watch);
    return device_watch(*watch, stream);
  }
  if (!from_output) return {};
  // One that cannot be remembered still reports its overflow.
  auto& owners = registry().owners;
  const auto slot = registry().arena.take();
  if (owners.size() <= slot.index) owners.resize(slot.index + 1);
  owners[slot.index] = {nullptr, describe(norm), nullptr};
  if (!is_capturing()) registry().arena.give_back(slot.index);
  ColumnWatch out{};
  out.report = slot.device;
  out.overflow_signal = &registry().arena.at(0).device->overflow;
  out.signal = slot.index;
  return out;
}
#endif

}  // namespace fused_norm::ops
