// How a family registers its operators, torch.ops.fused_norm.*: schemas and kernels.
#pragma once

#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "ops/autograd.h"

namespace fused_norm::ops {

// The functions look at device and layout themselves, so that a CPU-only build can say what is
// missing and a sparse argument is named. Of meta tensors they give shapes and dtypes.
template <typename Kernel>
void define(torch::Library& m, const std::string& name, const std::string& signature,
            Kernel* function, const std::vector<at::Tag>& tags = {}) {
  using Key = c10::DispatchKey;
  m.def((name + signature).c_str(), tags);
  for (const Key key : {Key::CPU, Key::CUDA, Key::Meta, Key::SparseCPU, Key::SparseCUDA,
                        Key::SparseCsrCPU, Key::SparseCsrCUDA, Key::MkldnnCPU, Key::QuantizedCPU,
                        Key::QuantizedCUDA, Key::NestedTensorCPU, Key::NestedTensorCUDA}) {
    m.impl(name.c_str(), torch::dispatch(key, function));
  }
}

// An operator that is differentiated by `autograd`, with its decomposition, to which
// fused_norm/_decompositions.py gives a kernel.
template <typename Kernel, typename Autograd>
void define_differentiable(torch::Library& m, const std::string& name, const std::string& signature,
                           Kernel* function, Autograd&& autograd) {
  define(m, name, signature, function);
  m.def(("decomposed_" + name + signature).c_str());
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, std::move(autograd)));
}

// An operator for a backward pass.
template <typename Kernel>
void define_backward(torch::Library& m, const std::string& name, const std::string& signature,
                     Kernel* function) {
  define_differentiable(m, name, signature, function,
                        torch::CppFunction::makeFromBoxedFunction<&differentiate_backward>());
}

}  // namespace fused_norm::ops
