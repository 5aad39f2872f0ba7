// The softmax operators: argument checks, allocation, the choice between the CPU path and the
// kernels, and derivatives. Those are in C++: torch's own softmax takes the host 6 us a call with a
// graph, and a Python autograd.Function alone as much again.
#include "ops/softmax.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "core/softmax/tier.h"
#include "cpu/softmax.h"
#include "ops/autograd.h"
#include "ops/launch.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "core/softmax/softmax.h"
#endif

namespace fused_norm::ops {

using at::ScalarType;
using at::Tensor;

namespace {

// The checks that need no tensor: dtypes that go together, and a dimension that an input of `ndim`
// dimensions has.
void check_softmax_options(ScalarType input, ScalarType out, int64_t ndim, int64_t dim) {
  check_floating(input, "input");
  TORCH_CHECK(out == input || (is_16_bit(input) && out == at::kFloat), "out_dtype is ", out,
              ", which does not go with ", input,
              " input: it must be the input's dtype, or float32 for 16-bit input");
  const int64_t dims = std::max<int64_t>(ndim, 1);
  TORCH_CHECK_INDEX(-dims <= dim && dim < dims, "dim is ", dim, ", but input has ", ndim,
                    " dimensions: dim must be in [", -dims, ", ", dims - 1, "]");
}

// The checks that every call passes, also where the decomposition runs.
void check_call(const SoftmaxCall& call) {
  const auto& [input, mask] = std::tie(call.input, call.mask);
  check_layout(input, "input");
  check_softmax_options(input.scalar_type(), call.y_dtype(), input.dim(), call.dim);
  TORCH_CHECK(std::isfinite(call.scale), "scale must be finite, but is ", call.scale);
  const bool last = call.dim == -1 || call.dim + 1 == std::max<int64_t>(input.dim(), 1);
  TORCH_CHECK((last && !call.log) || (call.scale == 1 && !call.hides()),
              "mask, scale and causal go with softmax over the last dimension alone, but dim is ",
              call.dim, " and log is ", call.log ? "True" : "False");
  TORCH_CHECK(!call.causal || input.dim() >= 2,
              "causal needs an input of at least 2 dimensions (queries, keys), but input has ",
              input.dim());
  if (!has(mask)) return;
  check_layout(*mask, "mask");
  const ScalarType type = mask->scalar_type();
  TORCH_CHECK(type == at::kBool || is_floating(type),
              "mask must be bool (true: masked out) or, to be added, float16, bfloat16, float32 or "
              "float64, but is ",
              type);
  check_device(*mask, "mask", input, "input");
  TORCH_SYM_CHECK(are_alike(mask->sym_sizes(), input.sym_sizes(), /*broadcasts=*/true),
                  "mask has shape ", mask->sym_sizes(),
                  ", which does not broadcast to input's shape ", input.sym_sizes());
}

constexpr const char* kTierNames[] = {"auto", "warp", "block", "uncached"};  // by SoftmaxTier
std::atomic<SoftmaxTier> wanted_tier{SoftmaxTier::kAuto};

const char* wanted_name() { return kTierNames[static_cast<int>(wanted_tier.load())]; }

// A tensor seen as (outer, cols, inner) around the dimension that is summed over.
struct Geometry {
  int64_t dim, outer, cols, inner;

  std::array<int64_t, 3> shape() const { return {outer, cols, inner}; }
  bool rows() const { return inner == 1; }  // of the dimensions from `dim` on
};

// `dim` has been checked.
Geometry geometry_of(const Tensor& tensor, int64_t dim) {
  if (tensor.dim() == 0) return {0, 1, 1, 1};
  const auto sizes = tensor.sizes();
  if (dim < 0) dim += tensor.dim();
  const Geometry geometry{dim, c10::multiply_integers(sizes.begin(), sizes.begin() + dim),
                          sizes[dim], c10::multiply_integers(sizes.begin() + dim + 1, sizes.end())};
  TORCH_CHECK(geometry.cols <= kMaxCols, "dim ", dim, " has ", geometry.cols,
              " elements; at most 2^30 are supported");
  return geometry;
}

void check_tier(const Tensor& tensor, const Geometry& geometry) {
  if (wanted_tier == SoftmaxTier::kAuto) return;
  TORCH_CHECK(tensor.is_cuda() && geometry.rows(), "tier is '", wanted_name(), "', but dim is ",
              geometry.dim, " of an input of shape ", tensor.sizes(), " on ", tensor.device(),
              ": only the last dimension on CUDA has tiers");
}

#ifdef FUSED_NORM_WITH_CUDA

void check_tier_holds(SoftmaxPass pass, const Geometry& geometry, ScalarType x, ScalarType y) {
  if (wanted_tier == SoftmaxTier::kAuto) return;
  TORCH_CHECK(geometry.outer < int64_t{1} << 28, "tier is '", wanted_name(), "', but input has ",
              geometry.outer, " rows: a tier is forced for less than 2^28");
  TORCH_CHECK(softmax_tier_holds(wanted_tier, pass, static_cast<int>(geometry.cols), to_dtype(x),
                                 to_dtype(y), current_device_properties()),
              "tier is '", wanted_name(), "', which does not hold rows of ", geometry.cols,
              " elements of ", x,
              is_backward(pass) ? " in the backward pass" : " in the forward pass");
}

// `mask` has input's shape by expand(). Owns its memory through the tensor it returns, which is the
// mask itself or a copy in a dtype that kernels read.
Tensor set_mask(const Tensor& mask, ScalarType input_dtype, SoftmaxMask* folded) {
  Tensor readable = mask;
  if (mask.scalar_type() == at::kDouble && input_dtype != at::kDouble) {
    // Of an expanded tensor this would convert each element as often as it is read.
    Tensor narrow = mask;
    for (int64_t d = 0; d < mask.dim(); ++d) {
      if (mask.stride(d) == 0) narrow = narrow.narrow(d, 0, 1);
    }
    readable = narrow.to(at::kFloat).expand(mask.sizes());
  }
  const auto dims = folded_dims(readable, 0, readable.dim() - 1);
  TORCH_CHECK(dims.size() <= SoftmaxMask::kMaxDims, "mask of strides ", mask.strides(),
              " and shape ", mask.sizes(),
              " (broadcast) has too many dimensions of unlike strides; at most ",
              SoftmaxMask::kMaxDims, " are supported");
  folded->data = readable.const_data_ptr();
  folded->additive = readable.scalar_type() != at::kBool;
  if (folded->additive) folded->dtype = to_dtype(readable.scalar_type());
  folded->col_stride = readable.dim() == 0 ? 0 : readable.stride(-1);
  folded->dims = static_cast<int>(dims.size());
  for (int d = 0; d < folded->dims; ++d) {
    folded->sizes[d] = make_divider(static_cast<uint32_t>(dims[d].first));
    folded->strides[d] = dims[d].second;
  }
  return readable;
}

void on_columns(const Geometry& geometry, ScalarType x_dtype, ScalarType y_dtype, bool log,
                bool backward, const Tensor& read, const Tensor& also_read, const Tensor& written) {
  const auto cols = static_cast<int32_t>(geometry.cols);
  const void* also = also_read.defined() ? also_read.const_data_ptr() : nullptr;
  const SoftmaxColumnsParams params{geometry.outer,
                                    cols,
                                    geometry.inner,
                                    to_dtype(x_dtype),
                                    to_dtype(y_dtype),
                                    log,
                                    backward,
                                    {read.const_data_ptr(), also},
                                    written.mutable_data_ptr()};
  launch(launch_softmax_columns, params);
}

// `mask` is undefined or has input's shape by expand().
void forward_on_cuda(const SoftmaxCall& call, const Geometry& geometry, const Tensor& mask,
                     const Tensor& y) {
  const c10::cuda::CUDAGuard guard(y.device());
  const ScalarType x_dtype = call.input.scalar_type(), y_dtype = y.scalar_type();
  const auto cols = static_cast<int32_t>(geometry.cols);
  if (!geometry.rows()) {
    return on_columns(geometry, x_dtype, y_dtype, call.log, /*backward=*/false,
                      call.input.contiguous(), {}, y);
  }
  check_tier_holds(forward_pass(call.scale, mask.defined(), call.causal), geometry, x_dtype,
                   y_dtype);
  const Rows x = as_rows(call.input, call.input.dim() - geometry.dim);
  SoftmaxForwardParams params{geometry.outer, cols, to_dtype(x_dtype), to_dtype(y_dtype), call.log};
  x.set(&params.x, &params.x_layout);
  params.y = y.mutable_data_ptr();
  params.scale = call.scale;
  const Tensor mask_data = mask.defined() ? set_mask(mask, x_dtype, &params.mask) : mask;
  params.causal = call.causal;
  params.queries = call.causal ? static_cast<uint32_t>(y.size(-2)) : 1;
  params.tier = wanted_tier;
  launch(launch_softmax_forward, params);
}

void backward_on_cuda(const Tensor& dy, const Tensor& output, const Geometry& geometry, bool log,
                      double scale, const Tensor& dx) {
  const c10::cuda::CUDAGuard guard(dx.device());
  const ScalarType x_dtype = dx.scalar_type(), y_dtype = dy.scalar_type();
  const auto cols = static_cast<int32_t>(geometry.cols);
  if (!geometry.rows()) {
    return on_columns(geometry, x_dtype, y_dtype, log, /*backward=*/true, dy.contiguous(),
                      output.contiguous(), dx);
  }
  check_tier_holds(backward_pass(log), geometry, x_dtype, y_dtype);
  const int64_t row_dims = dy.dim() - geometry.dim;
  const Rows dy_rows = as_rows(dy, row_dims), y_rows = as_rows(output, row_dims);
  SoftmaxBackwardParams params{geometry.outer,    cols, to_dtype(x_dtype),
                               to_dtype(y_dtype), log,  scale};
  dy_rows.set(&params.dy, &params.dy_layout);
  y_rows.set(&params.y, &params.y_layout);
  params.dx = dx.mutable_data_ptr();
  params.tier = wanted_tier;
  launch(launch_softmax_backward, params);
}

#endif  // FUSED_NORM_WITH_CUDA

// Contiguous.
Tensor softmax_forward(const SoftmaxCall& call) {
  check_call(call);
  const auto& [input, mask] = std::tie(call.input, call.mask);
  if (input.is_meta()) return new_like(input, call.y_dtype());
  const Geometry geometry = geometry_of(input, call.dim);
  check_tier(input, geometry);
  const Tensor y = new_like(input, call.y_dtype());
  if (input.numel() == 0) return y;
  TORCH_CHECK(geometry.outer <= std::numeric_limits<int32_t>::max() || !call.hides(),
              "input of shape ", input.sizes(), " has ", geometry.outer,
              " rows; with a mask or causal at most 2^31 - 1 are supported");
  const Tensor expanded = has(mask) ? mask->expand(input.sizes()) : Tensor();
  if (input.is_cpu()) {
    cpu::softmax_forward(input.reshape(geometry.shape()), call.log, expanded, call.scale,
                         call.causal ? input.size(-2) : 0, y);
#ifdef FUSED_NORM_WITH_CUDA
  } else {
    forward_on_cuda(call, geometry, expanded, y);
#endif
  }
  return y;
}

// The gradient of the input from `output`, in input_dtype; also of a masked call, as where an
// element was masked the output is zero.
Tensor softmax_backward(const Tensor& dy, const Tensor& output, int64_t dim, bool log,
                        ScalarType input_dtype, double scale) {
  check_layout(dy, "dy");
  check_layout(output, "output");
  check_like(output, "output", dy, "dy");
  check_floating(dy.scalar_type(), "dy");
  TORCH_CHECK(output.scalar_type() == dy.scalar_type(), "output must be ", dy.scalar_type(),
              " as dy is, but is ", output.scalar_type());
  check_softmax_options(input_dtype, dy.scalar_type(), dy.dim(), dim);
  TORCH_CHECK(std::isfinite(scale), "scale must be finite, but is ", scale);
  if (dy.is_meta()) return new_like(dy, input_dtype);
  const Geometry geometry = geometry_of(dy, dim);
  TORCH_CHECK(scale == 1 || geometry.rows(), "scale is ", scale, ", but dim is ", dim, " of shape ",
              dy.sizes(), ": only softmax over the last dimension is scaled");
  check_tier(dy, geometry);
  const Tensor dx = new_like(dy, input_dtype);
  if (dy.numel() == 0) return dx;
  if (dy.is_cpu()) {
    const auto shape = geometry.shape();
    cpu::softmax_backward(dy.reshape(shape), output.reshape(shape), log, scale, dx);
#ifdef FUSED_NORM_WITH_CUDA
  } else {
    backward_on_cuda(dy, output, geometry, log, scale, dx);
#endif
  }
  return dx;
}

const auto& forward_op() { return operator_of<kernel<softmax_forward>>("softmax_forward"); }
const auto& backward_op() { return operator_of<&softmax_backward>("softmax_backward"); }

}  // namespace

// Profiles show this name, which is to be the same in every build.
struct SoftmaxFunction : torch::autograd::Function<SoftmaxFunction> {
  static constexpr bool is_traceable = true;
  using Saved = std::tuple<int64_t, bool, ScalarType, double>;  // beside the output

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const SoftmaxCall& call) {
    const Tensor output = forward_op().below_autograd(call);
    ctx->save_for_backward({saved_result(output)});
    ctx->set_materialize_grads(false);
    ctx->saved_data["call"] = Saved(call.dim, call.log, input.scalar_type(), call.scale);
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(2);
    Tensor output = ctx->get_saved_variables()[0];
    make_result(&output, 0);
    const auto [dim, log, input_dtype, scale] = ctx->saved_data["call"].to<Saved>();
    return {backward_op().in_backward(grads[0], output, dim, log, input_dtype, scale), Tensor()};
  }
};

namespace {

Tensor differentiate(const SoftmaxCall& call) {
  TORCH_CHECK(!needs_grad(call.mask) && !any_tensor(has_tangent, call.mask),
              "mask requires grad, but scaled_masked_softmax does not differentiate a mask: pass "
              "mask.detach(), or add it to the input before softmax");
  if (auto result = forward_op().unrecorded(check_call, call)) return *result;
  check_layout(call.input, "input");  // Function asks for sizes, which not every tensor has
  return SoftmaxFunction::apply(call.input, call);
}

TORCH_LIBRARY_FRAGMENT(fused_norm, m) {
  define_differentiable(m, "softmax_forward",
                        "(Tensor input, int dim, bool log=False, ScalarType? out_dtype=None, "
                        "Tensor? mask=None, float scale=1.0, bool causal=False) -> Tensor",
                        kernel<softmax_forward>, kernel<differentiate>);
  define_backward(m, "softmax_backward",
                  "(Tensor dy, Tensor output, int dim, bool log, ScalarType input_dtype, float "
                  "scale=1.0) -> Tensor",
                  &softmax_backward);
}

}  // namespace

void force_softmax_tier(const std::string& wanted) {
  wanted_tier = static_cast<SoftmaxTier>(tier_number(kTierNames, wanted));
}

Tensor softmax(const SoftmaxCall& call) {
  return at::tracer::impl::is_dispatch_enabled() ? Tensor() : forward_op().call(call);
}

}  // namespace fused_norm::ops
