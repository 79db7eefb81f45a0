// Kernels for a CUDA device that is not there: each op of ATen runs on the CPU, and its bytes go over the current stream.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>

namespace {
using torch::jit::Stack;

// Calls `visit` with every tensor among the last `number` values.
template <class Visit>
void each_tensor(const Stack& stack, size_t number, Visit visit) {
  for (size_t at = stack.size() - number; at < stack.size(); ++at) {
    const c10::IValue& value = stack[at];
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& one : value.toListRef())
        if (one.isTensor()) visit(one.toTensor());
    }
  }
}

// The device of an op is that of its tensors, which have to agree; numbers may come from the host.
std::optional<c10::Device> device_of(const c10::OperatorHandle& op, const Stack& stack) {
  std::optional<c10::Device> device;
  each_tensor(stack, op.schema().arguments().size(), [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return;
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found ",
                *device, " and ", tensor.device(), " (", op.schema().name(), ")");
    device = tensor.device();
  });
  return device;
}

void on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  c10::cuda::OptionalCUDAGuard guard(device_of(op, *stack));
  at::native::cpu_fallback(op, stack);
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // an error that an earlier call has left behind shows here, as behind any kernel
}

// All bytes between the first and the last element.
at::Tensor span(const at::Tensor& of) {
  int64_t last = 0;
  auto bytes = at::empty({0}, of.options().dtype(at::kByte).requires_grad(false));
  for (int64_t d = 0; d < of.dim(); ++d) {
    if (!of.size(d)) return bytes;
    last += (of.size(d) - 1) * of.stride(d);
  }
  int64_t size = of.element_size();
  return bytes.set_(of.storage(), of.storage_offset() * size, {(last + 1) * size}, {1});
}
at::Tensor as(const at::Tensor& bytes, const at::Tensor& like) {
  auto made = at::empty({0}, bytes.options().dtype(like.dtype()));
  return made.set_(bytes.storage(), 0, like.sizes(), like.strides());
}
at::Tensor here(const at::Tensor& bytes) {
  auto host = at::empty(bytes.sizes(), bytes.options().device(at::kCPU));
  return at::native::copy_(host, bytes, false);
}

// torch's own, wherever it needs no kernel.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  at::NoGradGuard no_grad;
  if (self.numel() == 0) return self;
  auto source = from.expand_as(self);
  bool same = self.scalar_type() == source.scalar_type() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  bool laid_out = (self.is_contiguous() && source.is_contiguous()) ||
                  (self.strides() == source.strides() && self.is_non_overlapping_and_dense());
  if (same && laid_out) return at::native::copy_(self, source, non_blocking);
  if (source.is_cuda()) {
    source = as(here(span(source)), source);
    if (!self.is_cuda()) {
      self.copy_(source);
      return self;
    }
  }
  if (self.is_contiguous()) return at::native::copy_(self, source.to(self.scalar_type()).contiguous(), true);
  auto there = span(self);
  auto host = here(there);
  as(host, self).copy_(source);
  at::native::copy_(there, host, true);
  return self;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::Tensor target = to;
  if (target.sizes() != from.sizes()) target.resize_(from.sizes());
  copy_(target, from, true);
  return to;
}

// What gives a view, makes or lays out a tensor, or reads one number needs no kernel.
bool needs_kernel(const c10::FunctionSchema& schema) {
  static const std::set<std::string> without{
      "aten::empty", "aten::empty_strided", "aten::_efficientzerotensor", "aten::set_", "aten::resize_", "aten::record_stream",
      "aten::_local_scalar_dense", "aten::is_pinned", "aten::_pin_memory", "aten::is_set_to", "aten::_copy_from_and_resize",
      "aten::copy_", "aten::_has_same_storage_numel", "aten::_nested_view_from_buffer", "aten::_reshape_alias"};
  if (without.count(schema.name())) return false;
  for (auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return false;
  return true;
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || !needs_kernel(op->schema())) continue;
    auto bare = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(bare.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
  m.impl("copy_", &copy_);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  for (auto name : {"_fused_adamw_", "_fused_adam_"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}
