// Between attention.cpp, which has checked a call and made its results, and those who fill them:
// the CPU path and the CUDA kernels.
#pragma once

#include "ops/attention.h"

namespace fused_norm::ops {

// Query, key and value, each by itself.
using QueryKeyValue = std::array<at::Tensor, 3>;

// Columns next to each other; one copy where they are not.
at::Tensor with_dense_rows(const at::Tensor& tensor);

// A mask of four dimensions.
at::Tensor of_four_dims(at::Tensor mask);

// Where gradients are written: those of query, key and value may be views of what is returned.
struct NewGradients {
  AttentionGradients returned;
  QueryKeyValue qkv;
};

using ForwardBackend = void(const AttentionCall& call, const QueryKeyValue& qkv,
                            const at::Tensor& out, const at::Tensor& lse);
// Makes the gradients of the mask and of sinks, too.
using BackwardBackend = void(const AttentionBackwardCall& call, const QueryKeyValue& qkv,
                             NewGradients* made);
namespace on_cpu {
ForwardBackend attention_forward;
BackwardBackend attention_backward;
}  // namespace on_cpu
// In a build without CUDA: errors.
namespace on_cuda {
ForwardBackend attention_forward;
BackwardBackend attention_backward;
}  // namespace on_cuda

}  // namespace fused_norm::ops
