// A simulated accelerator: a PrivateUse1 backend of torch with two devices in the host's memory.
//
// Each operation runs at once, in the thread that calls it, on the host's kernels, so its numbers
// are the CPU's. What a backend adds is there:
//
//   - a current device and a current stream for each thread
//   - an error when an operation meets tensors of two devices
//   - if asked to, no float64: as on MPS, which cannot convert in a copy either
//
// Not simulated: streams, which order nothing here, and the time that anything takes. For both see
// tests/cuda.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>

namespace simulated {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;

// -- what each thread has ----------------------------------------------------------------------

thread_local int current_device = 0;
thread_local std::array<std::int64_t, DEVICES> current_streams{};

c10::Device device_at(int index) { return {KIND, static_cast<c10::DeviceIndex>(index)}; }

void set_device(int index) {
  TORCH_CHECK(0 <= index && index < DEVICES, "there is no simulated device ", index);
  current_device = index;
}

thread_local int kernels = 0;  // written in Python, around the operations that they consist of

// -- memory ------------------------------------------------------------------------------------

struct Allocator final : at::Allocator {
  static void release(void* block) { std::free(block); }
  at::DataPtr allocate(std::size_t size) override {
    void* block = size ? std::malloc(size + 64) : nullptr;  // kernels may read in whole vectors
    return {block, block, &release, device_at(current_device)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

/// Returns the same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto& storage = tensor.storage();
  auto memory = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      at::DataPtr(storage.mutable_data(), at::kCPU), at::GetAllocator(at::kCPU), true);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto host = at::detail::make_tensor<c10::TensorImpl>(std::move(memory), keys, tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

/// Returns a view of a device's memory with the shape of a tensor of the host.
at::Tensor view_like(const at::Tensor& base, const at::Tensor& host) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), host.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                    host.storage_offset());
  view._set_conj(host.is_conj());
  view._set_neg(host.is_neg());
  return view;
}

std::atomic<bool> lacks_float64{false};

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(!lacks_float64 || kernels || dtype != at::kDouble, "the device has no float64");
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  check_dtype(c10::dtype_or_default(dtype));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  check_dtype(c10::dtype_or_default(dtype));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

// -- streams and events ------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream_of(c10::Device device, std::int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(index_of(device)), id);
  }
  static std::int64_t next_id() {
    static std::atomic<std::int64_t> last{0};
    return ++last;
  }

  c10::DeviceType type() const override { return KIND; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return device_at(current_device); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device.has_index()) setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_streams.at(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(device, next_id());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(device, next_id());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + 1);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  // An event has always happened.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    static char only;
    *event = &only;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- random numbers ----------------------------------------------------------------------------

/// A generator of a device, which draws from one of the host's.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  void set_current_seed(std::uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { host.set_offset(offset); }
  std::uint64_t get_offset() const override { return host.get_offset(); }
  std::uint64_t current_seed() const override { return host.current_seed(); }
  std::uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }

  at::Generator host;
};

const at::Generator& default_generator(int index) {
  static auto generators = [] {
    std::array<at::Generator, DEVICES> made;
    for (int i = 0; i < DEVICES; i++) made[i] = at::make_generator<Generator>(i);
    return made;
  }();
  return generators.at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device;
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::GetAllocator(at::kCPU); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator.allocate(size);
    if (storage.data() && size)
      std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    auto& changed = const_cast<c10::Storage&>(storage);
    changed.set_data_ptr_noswap(std::move(memory));
    changed.set_nbytes(size);
  }
};

// -- copies ------------------------------------------------------------------------------------

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.scalar_type() != to.scalar_type()) {
    check_dtype(from.scalar_type());
    check_dtype(to.scalar_type());
  }
  at::AutoDispatchBelowADInplaceOrView below;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

// -- operations --------------------------------------------------------------------------------

/// Operations of lists, each of whose items may be on a device of its own.
bool takes_several_devices(const std::string& name) {
  return name.rfind("aten::_foreach", 0) == 0 || name.rfind("aten::_fused", 0) == 0;
}

/// Whether an operation writes an argument. The schemas of older kernels do not say that they
/// write running statistics.
bool writes(const c10::Argument& argument) {
  auto* alias = argument.alias_info();
  return (alias && alias->isWrite()) || argument.name().rfind("running_", 0) == 0;
}

/// Runs an operation on the CPU's kernel, in the memory of the devices themselves.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack) {}

  void run() {
    take_arguments();
    check_devices();
    c10::DeviceGuard guard(device_at(device_));
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    return_results();
  }

 private:
  struct Pair {
    at::Tensor ours, host;
    bool is_written;
    void* memory;  // of `host` before the operation, which may resize it
  };

  /// Replaces tensors, devices and generators by the host's.
  void take_arguments() {
    auto first = stack_->size() - schema_.arguments().size();
    for (std::size_t i = 0; i < schema_.arguments().size(); i++) {
      auto& argument = schema_.arguments()[i];
      auto& value = (*stack_)[first + i];
      if (value.isTensor()) {
        value = host_of(value.toTensor(), argument);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& item : value.toTensorVector()) list.push_back(host_of(item, argument));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& item : value.toOptionalTensorVector())
          list.push_back(item ? std::optional(host_of(*item, argument)) : item);
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == KIND) {
        value = at::Device(at::kCPU);
      } else if (argument.name() == "generator") {
        generator_ = &value;
      }
    }
    device_ = pairs_.empty() ? current_device : pairs_[0].ours.device().index();
    if (generator_) {
      auto generator = generator_->isNone() ? default_generator(device_) : generator_->toGenerator();
      TORCH_CHECK(generator.device() == device_at(device_), "expected a generator of ",
                  device_at(device_), ", got one of ", generator.device());
      *generator_ = generator.get<Generator>()->host;
    }
  }

  at::Tensor host_of(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!is_ours(tensor)) {
      if (tensor.defined() && tensor.dim() && argument.name() != "indices") has_host_tensor_ = true;
      return tensor;
    }
    auto host = on_host(tensor);
    pairs_.push_back({tensor, host, writes(argument), host.mutable_data_ptr()});
    return host;
  }

  void check_devices() const {
    if (takes_several_devices(name_)) return;
    for (auto& pair : pairs_)
      TORCH_CHECK(pair.ours.device().index() == device_,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_at(device_), " and ", pair.ours.device(), "! (in ", name_, ")");
    TORCH_CHECK(pairs_.empty() || !has_host_tensor_,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device_at(device_), " and cpu! (in ", name_, ")");
  }

  /// Replaces the results by tensors of the device.
  void return_results() {
    for (auto& pair : pairs_)
      if (pair.is_written && (pair.host.mutable_data_ptr() != pair.memory ||
                              pair.host.sizes() != pair.ours.sizes())) {
        at::native::resize_(pair.ours, pair.host.sizes());
        on_host(pair.ours).copy_(pair.host);
      }
    auto first = stack_->size() - schema_.returns().size();
    for (auto i = first; i < stack_->size(); i++) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = ours_of(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& item : value.toTensorVector()) list.push_back(ours_of(item));
        value = list;
      }
    }
  }

  at::Tensor ours_of(const at::Tensor& host) {
    if (!host.defined()) return host;
    for (auto& pair : pairs_) {
      if (host.is_same(pair.host)) return pair.ours;
      if (host.storage().data() && host.storage().data() == pair.host.storage().data())
        return view_like(pair.ours, host);
    }
    auto made = at::empty_strided(host.sizes(), host.strides(), host.options().device(device_at(device_)));
    on_host(made).copy_(host);
    return made;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  torch::jit::Stack* stack_;
  int device_ = 0;
  bool has_host_tensor_ = false;
  c10::IValue* generator_ = nullptr;
  std::vector<Pair> pairs_;
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::native::set_tensor_(self, source);
  });
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    return at::native::set_(self, std::move(source));
  });
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef size,
            at::IntArrayRef stride) -> at::Tensor& {
           return at::cpu::set_(self, std::move(source), offset, size, stride);
         });
  // torch would ask for kernels of our own.
  for (auto* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  using at::autocast::CastPolicy;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

// -- what Python asks for ----------------------------------------------------------------------

TORCH_LIBRARY(simulated, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", [] { return std::int64_t(DEVICES); });
  m.def("default_generator", [](std::int64_t index) { return default_generator(index); });
  m.def("begin_kernel", [] { kernels++; });
  m.def("end_kernel", [] { kernels--; });
  m.def("set_lacks_float64", [](bool lacks) { lacks_float64 = lacks; });
}

}  // namespace simulated
