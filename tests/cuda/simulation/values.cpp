// Right numbers on the simulated devices.
//
// Each operator that has a kernel for CUDA gets another one, which
//
//   1. calls torch's, with its checks, allocations and launches, which do nothing,
//   2. computes the same on the CPU, with tensors that alias the memory of the device,
//   3. writes the values to the outputs of 1.
//
// 2 and 3 are work of the current stream: in a capture they become nodes of the graph, and each
// replay computes. float16 and bfloat16 are computed in float32 and rounded once. Operators whose
// outputs have a size that depends on values are computed without 1. Those that have no kernel for
// the CPU are in kernels.h, or raise.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <memory>
#include <set>
#include <string>

#include "kernels.h"
#include "simulation.h"

namespace simulated {

using at::Device;
using c10::OperatorHandle;
using torch::jit::Stack;

static const bool is_lazy = simulated_is_lazy();

// -- memory of the device as tensors of the CPU ------------------------------------------------

struct Memory {
  explicit Memory(const Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        is_conj(tensor.is_conj()),
        is_neg(tensor.is_neg()) {
    if (!tensor.numel()) return;
    begin = (char*)tensor.const_data_ptr();
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
    bytes = (last + 1) * c10::elementSize(dtype);
  }

  Tensor alias() const {
    return bytes ? finished(at::from_blob(begin, sizes, strides, options())) : empty();
  }

  /// Returns a copy with the same strides, even if elements overlap.
  Tensor copy() const {
    if (!bytes) return empty();
    auto held = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    memcpy(held.data_ptr(), begin, bytes);
    auto keep = [held](void*) {};
    return finished(at::from_blob(held.data_ptr(), sizes, strides, keep, options()));
  }

  Tensor empty() const { return finished(at::empty_strided(sizes, strides, options())); }

  bool overlaps(const Memory& other) const {
    return bytes && other.bytes && begin < other.begin + other.bytes && other.begin < begin + bytes;
  }

  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;

 private:
  at::TensorOptions options() const { return at::TensorOptions().dtype(dtype); }

  Tensor finished(Tensor tensor) const {
    if (is_conj) tensor._set_conj(true);
    if (is_neg) tensor._set_neg(true);
    return tensor;
  }

  char* begin = nullptr;
  int64_t bytes = 0;  // to the end of the last element
  bool is_conj, is_neg;
};

static bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

static bool is_on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided;
}

// -- an operator -------------------------------------------------------------------------------

enum Access { READS, WRITES, IS_OUT };  // an `out` may be resized, and its values do not matter

enum Mode {
  USUAL,
  WITHOUT_ORIGINAL,  // torch's kernel would need the values
  MISSING,
};

struct Operator {
  c10::SafeKernelFunction original;
  std::optional<c10::SafeKernelFunction> cpu;
  Kernel own;
  OperatorHandle handle;
  std::string name;  // without the namespace
  Mode mode;
  std::vector<Access> accesses = {};  // of the arguments
  std::vector<size_t> dtypes = {};    // the arguments that are dtypes
  int generator = -1, half_to_float = -1;

  void read_schema() {
    // Their schemas do not say that they write running statistics.
    static const std::set<std::string> updates{"native_batch_norm", "native_batch_norm.out",
                                               "cudnn_batch_norm", "batch_norm_gather_stats",
                                               "batch_norm_gather_stats_with_counts",
                                               "batch_norm_update_stats"};
    auto& arguments = handle.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& argument = arguments[i];
      auto* alias = argument.alias_info();
      bool writes = alias && alias->isWrite();
      writes |= updates.count(name) && argument.name().rfind("running_", 0) == 0;
      accesses.push_back(!writes ? READS : argument.is_out() ? IS_OUT : WRITES);
      auto type = argument.real_type()->str();
      if (type.find("Generator") != std::string::npos) generator = (int)i;
      if (type.find("ScalarType") != std::string::npos) dtypes.push_back(i);
      if (argument.name() == "half_to_float") half_to_float = (int)i;
    }
  }

  bool is_random() const { return generator >= 0 || name == "native_dropout"; }
  bool is_copy() const { return name == "copy_"; }
  bool takes_lists_of_tensors(size_t argument) const {
    return handle.schema().arguments()[argument].type()->str().find("Tensor") != std::string::npos;
  }
};

// -- a call ------------------------------------------------------------------------------------

/// A tensor of the device among the arguments.
struct Input {
  size_t argument;
  int index;  // in a list, or -1
  Memory memory;
  Access access;
  Tensor before = {};  // the values that it had before the original was called
  Tensor used = {};    // what the CPU's kernel is given, and may write
};

/// A tensor of the device among the results.
struct Output {
  size_t result;
  int index;  // in a list, or -1
  Memory memory;
};

/// What is needed to compute a call later.
struct Call {
  const Operator& op;
  Values arguments = {};  // as the CPU's kernel takes them
  std::vector<Input> inputs = {};
  std::vector<Output> outputs = {};
  uint64_t seed = 0;
  Values results = {};

  /// Copies inputs that the call changes before they are read.
  void copy_inputs() {
    for (auto& input : inputs) {
      bool changes = input.access == WRITES;
      for (auto& other : inputs)
        changes |= other.access != READS && other.memory.overlaps(input.memory);
      if (changes && input.access != IS_OUT) input.before = input.memory.copy();
    }
  }

  bool copies_inputs() const {
    for (auto& input : inputs) {
      if (input.access == WRITES) return true;
      for (auto& other : inputs)
        if (input.access == IS_OUT && &other != &input && other.memory.overlaps(input.memory))
          return true;
    }
    return false;
  }

  void compute() {
    // None of these has to see an operator of the CPU.
    c10::impl::ExcludeDispatchKeyGuard exclude(
        c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Python,
                             c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchBatched,
                             c10::DispatchKey::FuncTorchVmapMode,
                             c10::DispatchKey::FuncTorchGradWrapper,
                             c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                             c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                             c10::DispatchKey::Functionalize, c10::DispatchKey::PreDispatch,
                             c10::DispatchKey::PythonDispatcher}));
    at::NoGradGuard no_grad;
    at::DisableRecordFunctionGuard no_profile;
    auto given = arguments;
    for (auto& input : inputs) {
      input.used = input.access == IS_OUT     ? input.memory.empty()
                   : input.before.defined() ? input.before
                                            : input.memory.alias();
      bool is_exact = op.name.rfind("nan_to_num", 0) == 0;  // it knows the largest number
      if (is_half(input.memory.dtype) && !is_exact) input.used = input.used.to(at::kFloat);
      if (input.index < 0)
        given[input.argument] = input.used;
      else
        given[input.argument].toList().set(input.index, input.used);
    }
    if (op.generator >= 0)
      given[op.generator] = at::make_generator<at::CPUGeneratorImpl>(seed);
    if (op.own) {
      results = op.own(given);
    } else {
      Stack stack(given.begin(), given.end());
      op.cpu->callBoxed(op.handle, c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      results.assign(stack.begin(), stack.end());
    }
  }

  void write() {
    for (auto& input : inputs)
      if (input.access != READS) write(input.memory, input.used);
    for (auto& output : outputs) {
      auto& result = results[output.result];
      if (output.index >= 0)
        write(output.memory, result.toListRef()[output.index].toTensor());
      else if (result.isTensor() && result.toTensor().defined())
        write(output.memory, result.toTensor());
    }
    for (auto& input : inputs) input.before.reset(), input.used.reset();
  }

 private:
  void write(const Memory& to, const Tensor& values) {
    auto target = to.alias();
    if (!target.numel() || !values.numel()) return;  // as the CPU returns no reserve
    if (values.numel() != target.numel())
      simulated_count(("values/sizes differ from the CPU's: " + op.name).c_str(), 1);
    else
      target.copy_(values.reshape(target.sizes()));
  }
};

// -- the kernel --------------------------------------------------------------------------------

/// One call of the operator, from the arguments on torch's stack to the results there.
class Runner {
 public:
  Runner(const Operator& op, c10::DispatchKeySet keys, Stack* stack)
      : op_(op),
        keys_(keys),
        stack_(stack),
        begin_(stack->size() - op.accesses.size()),
        given_(stack->begin() + begin_, stack->end()),
        call_(std::make_shared<Call>(Call{op})) {}

  void run() {
    for (size_t i = 0; i < given_.size(); ++i) call_->arguments.push_back(on_cpu(i, given_[i]));
    if (!device_) return call_original();
    TORCH_CHECK_NOT_IMPLEMENTED(op_.mode != MISSING, "aten::", op_.name,
                                " computes nothing on the simulated devices");
    simulated_trace("values of %s", op_.name.c_str());
    c10::cuda::CUDAGuard guard(*device_);
    stream_ = c10::cuda::getCurrentCUDAStream(device_->index());
    cudaStreamCaptureStatus status;
    cudaStreamIsCapturing(stream_->stream(), &status);
    is_captured_ = status != cudaStreamCaptureStatusNone;
    adapt_dtypes();
    draw_seed();
    bool waits = is_lazy && !is_captured_ && hold_memory_of_the_host();
    if (op_.mode == WITHOUT_ORIGINAL && !is_captured_) return run_without_original();
    if (call_->copies_inputs()) enqueue([](Call& call) { call.copy_inputs(); });
    call_original();
    find_outputs();
    enqueue([](Call& call) { call.compute(), call.write(); });
    finish(waits);
  }

 private:
  // Arguments.

  IValue on_cpu(size_t argument, const IValue& value) {
    if (value.isTensor()) return take(argument, -1, value.toTensor()) ? Tensor() : value;
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector())
        list.push_back(take(argument, list.size(), tensor) ? at::empty({0}) : tensor);
      return list;
    }
    if (value.isList() && op_.takes_lists_of_tensors(argument)) {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& item : value.toListRef()) {
        auto tensor = item.isTensor() ? std::optional(item.toTensor()) : std::nullopt;
        if (tensor && take(argument, list.size(), *tensor)) tensor = at::empty({0});
        list.push_back(tensor);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      use(value.toDevice());
      return Device(at::kCPU);
    }
    return value.isGenerator() ? IValue() : value;
  }

  bool take(size_t argument, size_t index, const Tensor& tensor) {
    if (!is_on_device(tensor)) return false;
    use(tensor.device());
    call_->inputs.push_back({argument, (int)index, Memory(tensor), op_.accesses[argument]});
    return true;
  }

  /// The first device among the arguments is the one of the call.
  void use(Device device) {
    if (device_) return;
    device_ = device.has_index() ? device : Device(at::kCUDA, c10::cuda::current_device());
  }

  bool has_half() const {
    for (auto& input : call_->inputs)
      if (is_half(input.memory.dtype)) return true;
    return false;
  }

  void adapt_dtypes() {
    auto& arguments = call_->arguments;
    for (size_t i : op_.dtypes)
      if (arguments[i].isInt() && is_half((at::ScalarType)arguments[i].toInt()))
        arguments[i] = (int64_t)at::kFloat;
    if (op_.half_to_float >= 0) arguments[op_.half_to_float] = false;
  }

  /// Random numbers depend on what the generator of the device would draw them from, so that a
  /// recomputation draws the same.
  void draw_seed() {
    if (!op_.is_random()) return;
    bool is_given = op_.generator >= 0 && given_[op_.generator].isGenerator();
    auto generator = is_given ? given_[op_.generator].toGenerator()
                              : at::globalContext().defaultGenerator(*device_);
    uint64_t offset = generator.device().is_cuda() && !is_captured_ ? generator.get_offset() : 0;
    call_->seed = generator.current_seed() * 0x9e3779b97f4a7c15ull + offset * 0xbf58476d1ce4e5b9ull;
    if (op_.generator < 0) call_->arguments.push_back((int64_t)call_->seed);
  }

  /// Copies pageable memory of the host, which may change as soon as this call returns, and says
  /// whether the host waits for the call to write such memory.
  bool hold_memory_of_the_host() {
    bool waits = false;
    for (size_t i = 0; i < given_.size(); ++i) {
      auto& value = call_->arguments[i];
      if (!given_[i].isTensor() || !value.isTensor()) continue;
      auto tensor = value.toTensor();
      if (!tensor.defined() || !tensor.is_cpu() || !tensor.numel()) continue;
      bool is_pinned = tensor.is_pinned();
      if (op_.accesses[i] != READS) {
        bool is_non_blocking = op_.is_copy() && given_[2].toBool();
        waits |= !is_pinned || !is_non_blocking;
      } else if (!is_pinned) {
        at::NoGradGuard no_grad;
        c10::impl::ExcludeDispatchKeyGuard exclude(
            c10::autograd_dispatch_keyset |
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::ADInplaceOrView}));
        value = tensor.clone();
      }
    }
    return waits;
  }

  // Work.

  void call_original() { op_.original.callBoxed(op_.handle, keys_, stack_); }

  /// Does a part of the call in the order of the stream.
  void enqueue(void (*part)(Call&)) {
    if (!is_captured_ && !is_lazy) return part(*call_);
    struct Held {
      std::shared_ptr<Call> call;
      void (*part)(Call&);
    };
    auto run = [](void* held) {
      auto& [call, part] = *(Held*)held;
      try {
        part(*call);
      } catch (const std::exception& error) {  // nobody is there to catch it
        simulated_count("values/errors in the work of a stream", 1);
        simulated_print("%s: %s", call->op.name.c_str(), error.what());
      }
    };
    auto drop = [](void* held) { delete (Held*)held; };
    auto source = source_of_copy();
    auto& stream = source ? *source : *stream_;
    simulated_stream_op(stream.device_index(), stream.stream(), "values", "", run,
                        new Held{call_, part}, drop);
    if (source)
      simulated_join(device_->index(), stream_->stream(), stream.device_index(), stream.stream());
  }

  /// The stream that makes a copy from another device: the one of the source.
  std::optional<c10::cuda::CUDAStream> source_of_copy() const {
    auto& inputs = call_->inputs;
    if (!is_lazy || is_captured_ || !op_.is_copy() || inputs.size() != 2) return std::nullopt;
    auto source = given_[1].toTensor().device();
    if (source == given_[0].toTensor().device()) return std::nullopt;
    return c10::cuda::getCurrentCUDAStream(source.index());
  }

  // Results.

  size_t number_of_results() const { return op_.handle.schema().returns().size(); }
  IValue& result(size_t i) { return (*stack_)[stack_->size() - number_of_results() + i]; }

  void find_outputs() {
    for (size_t i = 0; i < number_of_results(); ++i) {
      auto* alias = op_.handle.schema().returns()[i].alias_info();
      if (alias && alias->isWrite()) continue;  // an argument
      if (result(i).isTensor() && is_on_device(result(i).toTensor()))
        call_->outputs.push_back({i, -1, Memory(result(i).toTensor())});
      if (!result(i).isTensorList()) continue;
      int index = 0;
      for (const Tensor& tensor : result(i).toTensorVector()) {
        if (is_on_device(tensor)) call_->outputs.push_back({i, index, Memory(tensor)});
        ++index;
      }
    }
    for (auto& input : call_->inputs)
      if (input.access == IS_OUT) input.memory = Memory(given(input));  // it may have been resized
  }

  Tensor given(const Input& input) const {
    auto& value = given_[input.argument];
    return input.index < 0 ? value.toTensor() : value.toTensorVector()[input.index];
  }

  /// Returns numbers, which the original could not know, once they are computed.
  void finish(bool waits) {
    for (size_t i = 0; i < number_of_results(); ++i)
      waits |= !result(i).isTensor() && !result(i).isTensorList() && !result(i).isNone();
    if (is_captured_ || (is_lazy && !waits)) return;
    if (is_lazy) cudaStreamSynchronize(stream_->stream());
    for (size_t i = 0; i < number_of_results() && i < call_->results.size(); ++i)
      if (!result(i).isTensor() && !result(i).isTensorList() && !result(i).isNone())
        result(i) = call_->results[i];
  }

  // Without the original.

  void run_without_original() {
    if (is_lazy) cudaStreamSynchronize(stream_->stream());
    call_->copy_inputs();
    for (auto& input : call_->inputs)
      if (input.access == IS_OUT)
        input.memory = Memory(at::empty({0}, at::TensorOptions().dtype(input.memory.dtype)));
    call_->compute();
    Values made;
    for (size_t i = 0; i < number_of_results(); ++i) {
      auto* alias = op_.handle.schema().returns()[i].alias_info();
      auto& value = call_->results[i];
      if (alias && alias->isWrite())
        made.push_back(written(*alias, value));
      else if (value.isTensor())
        made.push_back(on_device(value.toTensor()));
      else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor));
        made.push_back(list);
      } else
        made.push_back(value);
    }
    stack_->resize(begin_);
    for (auto& value : made) stack_->push_back(value);
  }

  /// Writes a result to the argument that it is.
  IValue written(const c10::AliasInfo& alias, const IValue& value) {
    for (auto& input : call_->inputs) {
      auto* other = op_.handle.schema().arguments()[input.argument].alias_info();
      if (!other || other->beforeSets() != alias.beforeSets()) continue;
      auto target = given(input);
      auto values = input.used.defined() ? input.used : value.toTensor();
      if (target.sizes() != values.sizes()) target.resize_(values.sizes());
      Memory(target).alias().copy_(values);
      return target;
    }
    return value;
  }

  Tensor on_device(const Tensor& values) {
    if (!values.defined()) return values;
    auto dtype = values.scalar_type();
    if (dtype == at::kFloat)
      for (auto& input : call_->inputs)
        if (is_half(input.memory.dtype)) dtype = input.memory.dtype;
    auto options = at::TensorOptions().dtype(dtype).device(*device_);
    auto made = at::empty_strided(values.sizes(), values.strides(), options);
    Memory(made).alias().copy_(values);
    return made;
  }

  const Operator& op_;
  c10::DispatchKeySet keys_;
  Stack* stack_;
  size_t begin_;
  Values given_;
  std::shared_ptr<Call> call_;
  std::optional<Device> device_;
  std::optional<c10::cuda::CUDAStream> stream_;
  bool is_captured_ = false;
};

struct BoxedKernel final : c10::OperatorKernel {
  Operator op;

  explicit BoxedKernel(Operator given) : op(std::move(given)) { op.read_schema(); }

  void operator()(const OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    Runner(op, keys, stack).run();
  }
};

// -- which operators ---------------------------------------------------------------------------

static bool begins_with(const std::string& name, const std::vector<const char*>& beginnings) {
  for (auto* beginning : beginnings)
    if (name.rfind(beginning, 0) == 0) return true;
  return false;
}

/// Whether an operator computes nothing: it allocates, returns a view, or asks.
static bool computes_nothing(const std::string& name, const OperatorHandle& handle) {
  static const std::set<std::string> names{
      "record_stream", "_local_scalar_dense", "is_pinned", "_pin_memory", "pin_memory",
      "is_set_to", "_has_same_storage_numel", "resize_", "_resize_output_", "resize_as_", "set_",
      "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
      "_cudnn_init_dropout_state", "_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor",
      "_nested_tensor_size", "_is_any_true", "cudnn_is_acceptable", "_debug_has_internal_overlap",
      "_efficientzerotensor", "to_padded_tensor"};
  if (names.count(name)) return true;
  if (begins_with(name, {"empty", "_empty", "new_empty", "_cufft", "_sparse", "sparse", "_nested",
                         "_cslt", "_flash", "_efficient_attention", "to_sparse", "_to_sparse",
                         "_coalesce", "_indices", "_values", "values", "indices"}))
    return true;
  for (auto& result : handle.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

static bool needs_values(const std::string& name) {
  return begins_with(
      name, {"nonzero", "masked_select", "unique", "_unique", "bincount", "repeat_interleave",
             "embedding_dense_backward", "_embedding_bag", "linalg_", "_linalg", "cholesky",
             "_cholesky", "geqrf", "ormqr", "lu_", "triangular_solve", "_fft", "histc", "_ctc_loss",
             "equal", "mode", "randperm", "multinomial", "_histogramdd", "segment_reduce", "median",
             "nanmedian", "_cudnn_ctc"});
}

static std::unique_ptr<BoxedKernel> kernel_for(const std::string& name, OperatorHandle handle) {
  auto own = kernel_of(name);
  bool has_cpu = handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  auto mode = !own && !has_cpu ? MISSING : needs_values(name) ? WITHOUT_ORIGINAL : USUAL;
  auto original = handle.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
  Operator op{original, std::nullopt, own, handle, name, mode};
  if (!own && has_cpu) op.cpu = handle.getComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  return std::make_unique<BoxedKernel>(std::move(op));
}

}  // namespace simulated

/// Lets all operators compute.
extern "C" __attribute__((visibility("default"))) void simulated_values_install() {
  using namespace simulated;
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                            __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  names.push_back({"aten::copy_", ""});  // one kernel for all devices
  for (auto& full : names) {
    if (full.name.rfind("aten::", 0)) continue;
    auto name = full.name.substr(6) + (full.overload_name.empty() ? "" : "." + full.overload_name);
    auto handle = dispatcher.findSchema(full);
    if (!handle || computes_nothing(name, *handle)) continue;
    auto kernel = torch::CppFunction::makeFromBoxedFunctor(kernel_for(name, *handle));
    library->impl(name.c_str(), std::move(kernel));
  }
}
