// Kernels for a CUDA device that is not there: each op of ATen becomes work of the current stream, done by the CPU's
// kernel on the memory of the device when the stream comes to it.
//
//   op ─► same device? ─► shapes of its results, from its meta kernel ─► results allocated ─► work queued ─► the caller goes on
//                                      └─ it has none (the result's size depends on data) ─► done at once, and waited for
//
// The work names addresses, not tensors: whoever frees memory that a queued kernel needs sees what a device would do.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

extern "C" {
cudaError_t late_launch(cudaStream_t stream, const char* name, void (*run)(void*), void (*drop)(void*), void* data);
void* late_behind(const void* pointer);
void late_note(const char* what);
}

namespace {
using torch::jit::Stack;

// An op that is part of a kernel is nobody's business: no autograd, no autocast, no mode of Python sees it.
struct Quietly {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

c10::IValue replaced(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) return value.toTensor().defined() ? replace(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector()) list.push_back(replace(one));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      list.push_back(one && one->defined() ? std::optional(replace(*one)) : one);
    return list;
  }
  return value;
}
void each_tensor(c10::ArrayRef<c10::IValue> values, const std::function<void(const at::Tensor&)>& visit) {
  for (auto& value : values) replaced(value, [&](const at::Tensor& tensor) { visit(tensor); return tensor; });
}
c10::ArrayRef<c10::IValue> arguments(const c10::OperatorHandle& op, const Stack& stack) {
  size_t number = op.schema().arguments().size();
  return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - number);
}

// The device of an op is that of its tensors, which have to agree; single numbers may lie on the host.
std::optional<c10::Device> device_of(const c10::OperatorHandle& op, const Stack& stack) {
  std::optional<c10::Device> device;
  each_tensor(arguments(op, stack), [&](const at::Tensor& tensor) {
    if (!tensor.is_cuda()) return;
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two, ",
                *device, " and ", tensor.device(), "! (", op.schema().name(), ")");
    device = tensor.device();
  });
  return device;
}

// The same elements, where the executor finds them.
at::Tensor behind(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto made = at::from_blob(late_behind(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}
at::Tensor read_now(const at::Tensor& tensor) {
  if (tensor.is_cuda()) return behind(tensor);
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}
at::Tensor shape_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda() && !tensor.dim()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false));
}

void launch(const char* name, std::function<void()> run) {
  auto* data = new std::function<void()>(std::move(run));
  late_launch(
      c10::cuda::getCurrentCUDAStream(), name,
      [](void* data) {
        c10::InferenceMode no_inference(false);
        Quietly quietly;
        (*(std::function<void()>*)data)();
      },
      [](void* data) { delete (std::function<void()>*)data; }, data);
}

// -- random numbers: of the device's generator, which a graph reads from memory, and drawn by one of the host ---------

std::optional<at::PhiloxCudaState> drawn(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values) {
  std::optional<at::Generator> given;
  bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  for (auto& value : values)
    if (value.isGenerator()) given = value.toGenerator();
  if (!random && !given) return std::nullopt;
  auto generator = given ? *given : at::cuda::detail::getDefaultCUDAGenerator(c10::cuda::current_device());
  if (generator.device().type() != at::kCUDA) return std::nullopt;
  std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(4);
}
uint64_t seed_of(const at::PhiloxCudaState& state) {
  uint64_t seed = state.captured_ ? *(uint64_t*)late_behind(state.seed_.ptr) : state.seed_.val;
  uint64_t offset = state.captured_ ? *(uint64_t*)late_behind(state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
  return seed * 0x9E3779B97F4A7C15ull + offset * 0xD1B54A32D192ED03ull;
}
void call(const c10::OperatorHandle& op, Stack& stack, const std::optional<at::PhiloxCudaState>& state) {
  if (!state) return op.callBoxed(&stack);
  for (size_t at = 0; at < stack.size(); ++at)
    if (op.schema().arguments()[at].name() == "generator") {
      stack[at] = at::detail::createCPUGenerator(seed_of(*state));
      return op.callBoxed(&stack);
    }
  auto host = at::detail::getDefaultCPUGenerator();  // what takes no generator draws from it
  auto kept = host.get_state();
  host.set_current_seed(seed_of(*state));
  op.callBoxed(&stack);
  host.set_state(kept);
}

// -- ops --------------------------------------------------------------------------------------------------------------

// Whether all that an op gives back are tensors, laid out plainly, which it may fill later.
bool can_wait(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values) {
  auto& schema = op.schema();
  for (auto& returned : schema.returns())
    if (!returned.type()->isSubtypeOf(*c10::TensorType::get()) && !returned.type()->isSubtypeOf(*c10::ListType::ofTensors())) return false;
  bool plain = true;
  for (size_t at = 0; at < values.size(); ++at) {
    auto* written = schema.arguments()[at].alias_info();
    each_tensor(values[at], [&](const at::Tensor& tensor) {
      plain = plain && tensor.layout() == at::kStrided && (tensor.is_cuda() || !(written && written->isWrite()));
    });
  }
  return plain;
}

// A gradient that the caller does not want is no tensor, whatever the meta kernel says.
bool unwanted(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values, size_t result) {
  for (size_t at = 0; at < values.size(); ++at) {
    if (schema.arguments()[at].name() != "output_mask" || !values[at].isBoolList()) continue;
    auto mask = values[at].toBoolList();
    return result < mask.size() && !mask.get(result);
  }
  return false;
}

// Results of the shapes that the meta kernel says; what is written in place is that argument itself.
std::optional<Stack> results(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values, c10::Device device) {
  auto& schema = op.schema();
  Stack shapes;
  for (auto& value : values) {
    if (value.isDevice()) shapes.push_back(c10::Device(at::kMeta));
    else if (value.isGenerator()) shapes.push_back(c10::IValue());
    else shapes.push_back(replaced(value, shape_of));
  }
  try {
    Quietly quietly;
    op.callBoxed(&shapes);
  } catch (const std::exception&) {
    return std::nullopt;  // it has none, or the call is wrong: which the CPU's kernel then says
  }
  Stack made;
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    auto* alias = schema.returns()[at].alias_info();
    if (!alias && unwanted(schema, values, at)) {
      made.push_back(at::Tensor());
      continue;
    }
    if (!alias) {
      bool there = true;
      made.push_back(replaced(shapes[at], [&](const at::Tensor& shape) {
        there = there && shape.is_meta();
        return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
      }));
      if (!there) return std::nullopt;
      continue;
    }
    for (size_t of = 0; of < values.size(); ++of) {
      auto* argument = schema.arguments()[of].alias_info();
      if (!argument || argument->beforeSets() != alias->beforeSets()) continue;
      if (values[of].isTensor() && values[of].toTensor().sizes() != shapes[at].toTensor().sizes())
        values[of].toTensor().resize_(shapes[at].toTensor().sizes());
      made.push_back(values[of]);
      break;
    }
  }
  return made;
}

bool later(const c10::OperatorHandle& op, Stack* stack, c10::Device device) {
  auto values = arguments(op, *stack);
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) return false;
  if (!can_wait(op, values)) return false;
  auto made = results(op, values, device);
  if (!made) return false;
  Stack inputs, fresh;
  for (auto& value : values) inputs.push_back(value.isDevice() ? c10::IValue(c10::Device(at::kCPU)) : replaced(value, read_now));
  auto& returns = op.schema().returns();
  for (size_t at = 0; at < returns.size(); ++at) fresh.push_back(returns[at].alias_info() ? c10::IValue() : replaced((*made)[at], behind));
  launch(op.schema().name().c_str(), [op, inputs, fresh, state = drawn(op, values)] {
    Stack called = inputs;
    call(op, called, state);
    for (size_t at = 0; at < fresh.size(); ++at) {
      std::vector<at::Tensor> from, to;
      each_tensor(called[at], [&](const at::Tensor& tensor) { from.push_back(tensor); });
      each_tensor(fresh[at], [&](const at::Tensor& tensor) { to.push_back(tensor); });
      for (size_t one = 0; one < to.size(); ++one) {
        TORCH_CHECK(from.at(one).sizes() == to[one].sizes(), "the CPU's result has the shape ", from[one].sizes(), ", not ", to[one].sizes());
        to[one].copy_(from[one]);
      }
    }
  });
  torch::jit::drop(*stack, values.size());
  for (auto& value : *made) stack->push_back(std::move(value));
  return true;
}

void on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  auto device = device_of(op, *stack);
  for (auto& value : arguments(op, *stack))
    if (!device && value.isDevice() && value.toDevice().has_index()) device = value.toDevice();
  if (!device) device = c10::Device(at::kCUDA, c10::cuda::current_device());
  c10::cuda::CUDAGuard guard(*device);
  if (!later(op, stack, *device)) {
    late_note(("done at once: " + op.schema().name()).c_str());
    at::native::cpu_fallback(op, stack);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // an error that an earlier call has left behind shows here, as behind any kernel
}

// torch's own wherever it needs no kernel: between host and device, and on a device what is one piece of memory.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (!self.numel()) return self;
  auto source = from.expand_as(self);
  bool same = self.scalar_type() == source.scalar_type() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  bool one_piece = (self.is_contiguous() && source.is_contiguous()) ||
                   (self.strides() == source.strides() && self.is_non_overlapping_and_dense());
  if (self.device() != source.device() || (same && one_piece)) return at::native::copy_(self, source, non_blocking);
  c10::cuda::CUDAGuard guard(self.device());
  launch("copy_", [to = behind(self), here = behind(source)]() mutable { to.copy_(here); });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return self;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::Tensor target = to;
  if (target.sizes() != from.sizes()) target.resize_(from.sizes());
  return copy_(target, from, false);
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
