// The derivatives of gated RMSNorm.
#include "ops/autograd.h"
#include "ops/norm_gated.h"

namespace fused_norm::ops {

// Profiles show this name.
struct RMSNormGatedFunction : CallFunction<RMSNormGatedFunction> {
  static constexpr const char* kBackward = "fused_norm::rms_norm_gated_backward";
  static constexpr std::array<int64_t, 3> kPlaces = {kInput, kGate, kWeight};
  static constexpr bool kSavesFirst = false, kDifferentiatesSecond = false;

  static const auto& op() {
    static const Operator op("rms_norm_gated_forward", kernel<rms_norm_gated_forward>);
    return op;
  }
  static c10::Stack before(const variable_list& grads, const at::Tensor&, const at::Tensor& rstd) {
    return {grads[0], rstd};
  }
};

Forward differentiate_rms_norm_gated(const GatedCall& call) {
  return differentiate_call<RMSNormGatedFunction>(call, check_rms_norm_gated);
}

}  // namespace fused_norm::ops
