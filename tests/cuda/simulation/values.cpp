// Real numbers on the fake CUDA devices of the rig: see README.md.
//
// Each operator that has a kernel for CUDA gets another one, which (1) calls the kernel of torch, whose launches do nothing,
// (2) computes the same on the CPU, with tensors that alias the memory of the "device", (3) writes the values to the outputs of
// (1). In a capture of a CUDA graph, (2) and (3) become a node of the graph, and each replay computes.
//
// Environment: SIMULATED_NUMBERS=0 (off), SIMULATED_NUMBERS_MISSING=raise|warn, SIMULATED_NUMBERS_TRACE=1.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <cuda_runtime_api.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include "simulation.h"

using namespace at;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
typedef std::vector<IValue> Values;
typedef std::function<Values(Values&)> Custom;

static const bool tracing = getenv("SIMULATED_NUMBERS_TRACE") && atoi(getenv("SIMULATED_NUMBERS_TRACE"));
static bool missing_raises() { const char* v = getenv("SIMULATED_NUMBERS_MISSING"); return !v || strcmp(v, "warn"); }
static std::mutex& lock() { static auto* m = new std::mutex; return *m; }
static std::map<std::string, long>& notes() { static auto* m = new std::map<std::string, long>; return *m; }
static void note(const std::string& text) {
  std::lock_guard<std::mutex> g(lock());
  if (!notes()[text]++ && getenv("SIMULATED_NUMBERS_NOTES")) fprintf(stderr, "[cudanum] %s\n", text.c_str());
}
static thread_local int off = 0;

// -- memory of the device as tensors of the CPU -----------------------------------------------------------------------------
struct Raw {
  void* data = nullptr;
  std::vector<int64_t> sizes, strides;
  ScalarType dtype = kFloat;
  bool conj = false, neg = false;
  int64_t bytes = 0;  // from data to the end of the last element
  explicit Raw(const Tensor& t)
      : data(t.numel() ? const_cast<void*>(t.const_data_ptr()) : nullptr), sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()), conj(t.is_conj()), neg(t.is_neg()) {
    if (t.numel()) {
      int64_t last = 0;
      for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
      bytes = (last + 1) * (int64_t)c10::elementSize(dtype);
    }
  }
  Tensor on_cpu(void* at) const {
    auto options = TensorOptions().dtype(dtype).device(kCPU);
    Tensor t = bytes ? from_blob(at, sizes, strides, options) : at::empty_strided(sizes, strides, options);
    if (conj) t._set_conj(true);
    if (neg) t._set_neg(true);
    return t;
  }
  Tensor alias() const { return on_cpu(data); }
  Tensor copy() const {  // with the same strides, overlaps included
    if (!bytes) return alias();
    auto blob = at::empty({bytes}, TensorOptions().dtype(kByte).device(kCPU));
    memcpy(blob.data_ptr(), data, (size_t)bytes);
    auto options = TensorOptions().dtype(dtype).device(kCPU);
    Tensor t = from_blob(blob.data_ptr(), sizes, strides, [blob](void*) {}, options);
    if (conj) t._set_conj(true);
    if (neg) t._set_neg(true);
    return t;
  }
  bool overlaps(const Raw& o) const { return bytes && o.bytes && (char*)data < (char*)o.data + o.bytes && (char*)o.data < (char*)data + bytes; }
};
static bool is_half(ScalarType t) { return t == kHalf || t == kBFloat16; }
static bool on_device(const Tensor& t) { return t.defined() && t.is_cuda() && t.layout() == kStrided; }

// -- a call -----------------------------------------------------------------------------------------------------------------
struct Slot {  // one tensor of the device among the arguments
  int argument, element;  // element is -1 without a list
  Raw raw;
  bool written, is_out;
  Tensor snapshot, used;
};
struct Call {
  const OperatorHandle* op;
  const Custom* custom;
  const c10::SafeKernelFunction* cpu;
  std::string name;
  Values arguments;  // without tensors of the device
  std::vector<Slot> slots;
  std::vector<std::pair<int, Raw>> outputs;      // index of the return
  std::vector<std::tuple<int, int, Raw>> lists;  // index of the return, and in the list
  uint64_t seed = 0;
  int generator = -1;
  bool upcast = true, keeps = false;
  Values results;

  void snap() {
    for (auto& s : slots) {
      if (s.is_out) continue;
      bool takes = s.written;
      for (auto& o : slots) takes = takes || (o.written && o.raw.overlaps(s.raw));
      if (takes) s.snapshot = s.raw.copy();
    }
  }
  void compute() {
    c10::impl::ExcludeDispatchKeyGuard exclude(
        c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset | c10::DispatchKeySet({DispatchKey::ADInplaceOrView, DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
            DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchDynamicLayerFrontMode,
            DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::Functionalize, DispatchKey::PreDispatch, DispatchKey::PythonDispatcher}));
    NoGradGuard no_grad;
    at::DisableRecordFunctionGuard no_profile;
    Values given = arguments;
    for (auto& s : slots) {
      Tensor t = s.is_out ? at::empty_strided(s.raw.sizes, s.raw.strides, TensorOptions().dtype(s.raw.dtype)) : s.snapshot.defined() ? s.snapshot : s.raw.alias();
      if (upcast && is_half(t.scalar_type())) t = t.to(kFloat);
      s.used = t;
      if (s.element < 0) given[(size_t)s.argument] = t;
      else given[(size_t)s.argument].toList().set((size_t)s.element, t);
    }
    if (generator >= 0) given[(size_t)generator] = at::make_generator<CPUGeneratorImpl>(seed);
    results.clear();
    try {
      if (*custom) results = (*custom)(given);
      else {
        Stack stack(given.begin(), given.end());
        cpu->callBoxed(*op, c10::DispatchKeySet(DispatchKey::CPU), &stack);
        results.assign(stack.begin(), stack.end());
      }
    } catch (c10::Error& e) {
      note("CPU kernel of " + name + " raises: " + e.what_without_backtrace());
      throw;
    }
    for (auto& s : slots) if (s.written) put(s.raw, s.used, "argument");
    for (auto& [i, raw] : outputs) if (results[(size_t)i].isTensor() && results[(size_t)i].toTensor().defined()) put(raw, results[(size_t)i].toTensor(), "output");
    for (auto& [i, j, raw] : lists) put(raw, results[(size_t)i].toListRef()[(size_t)j].toTensor(), "output in a list");
    for (auto& s : slots) { s.snapshot.reset(); if (!keeps) s.used.reset(); }
  }
  void put(const Raw& to, const Tensor& values, const char* what) {
    if (!to.bytes) return;
    if (values.sizes() != to.sizes) {
      if (values.numel() == 0) return;
      if (values.numel() != c10::multiply_integers(to.sizes)) {
        std::ostringstream s;
        s << "MISMATCH of " << name << ", " << what << ": CUDA has " << IntArrayRef(to.sizes) << ", the CPU " << values.sizes();
        note(s.str());
        return;
      }
      to.alias().copy_(values.reshape(to.sizes));
      return;
    }
    to.alias().copy_(values);
  }
};
static void place(Call& call, Device device, Stack& stack, size_t begin, size_t n, const Values& originals, bool has_half) {
  // The outputs are made here, from what the CPU has returned.
  std::vector<Tensor> used;
  for (auto& s : call.slots) s.raw = s.is_out ? Raw(at::empty({0}, TensorOptions().dtype(s.raw.dtype))) : s.raw;
  call.keeps = true;
  call.compute();
  auto to_device = [&](const Tensor& c) -> Tensor {
    if (!c.defined()) return c;
    ScalarType t = c.scalar_type();
    if (has_half && t == kFloat) for (auto& s : call.slots) if (is_half(s.raw.dtype)) t = s.raw.dtype;
    Tensor d = at::empty_strided(c.sizes(), c.strides(), TensorOptions().dtype(t).device(device));
    Raw(d).alias().copy_(c);
    return d;
  };
  auto& returns = call.op->schema().returns();
  Values out;
  for (size_t i = 0; i < returns.size(); ++i) {
    const IValue& v = call.results[i];
    auto* a = returns[i].alias_info();
    if (a && a->isWrite()) {
      for (size_t k = 0; k < call.slots.size(); ++k) {
        auto& s = call.slots[k];
        auto* b = call.op->schema().arguments()[(size_t)s.argument].alias_info();
        if (!b || b->beforeSets() != a->beforeSets()) continue;
        Tensor target = originals[(size_t)s.argument].toTensor();
        Tensor values = s.used.defined() ? s.used : v.toTensor();
        if (s.is_out) { if (target.sizes() != values.sizes()) target.resize_(values.sizes()); Raw(target).alias().copy_(values); }
        out.push_back(target);
        break;
      }
    } else if (v.isTensor()) out.push_back(to_device(v.toTensor()));
    else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(to_device(t));
      out.push_back(list);
    } else out.push_back(v);
  }
  for (auto& s : call.slots) s.used.reset();
  stack.resize(begin);
  for (auto& v : out) stack.push_back(v);
}
static void run_snap(void* c) { ((Call*)c)->snap(); }
static void run_compute(void* c) { ((Call*)c)->compute(); }
static void lazy_snap(void* c) { (*(std::shared_ptr<Call>*)c)->snap(); }
static void lazy_compute(void* c) {
  try { (*(std::shared_ptr<Call>*)c)->compute(); } catch (std::exception& e) { note(std::string("in a lazy call or a replay: ") + e.what()); fprintf(stderr, "[cudanum] %s\n", e.what()); }
}
static void lazy_drop(void* c) { delete (std::shared_ptr<Call>*)c; }
static const bool lazy = simulated_is_lazy();

// -- the kernel -------------------------------------------------------------------------------------------------------------
enum Mode { Usual, WithoutOriginal, Missing };
struct Shadow final : public c10::OperatorKernel {
  c10::SafeKernelFunction original;
  std::optional<c10::SafeKernelFunction> cpu;
  OperatorHandle op;
  Custom custom;
  Mode mode;
  std::string name;
  std::vector<int> written, scalar_types;
  int generator = -1, half_to_float = -1;
  bool random = false;
  std::atomic<long> calls{0};
  Shadow(c10::SafeKernelFunction f, OperatorHandle o, Custom c, Mode m) : original(std::move(f)), op(o), custom(std::move(c)), mode(m), name(toString(o.operator_name())) {
    static const std::set<std::string> updates = {"native_batch_norm", "native_batch_norm.out", "cudnn_batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats", "miopen_batch_norm"};
    auto short_name = name.substr(6);
    const auto& args = op.schema().arguments();
    for (size_t i = 0; i < args.size(); ++i) {
      auto* a = args[i].alias_info();
      bool w = a && a->isWrite();
      if (updates.count(short_name) && (args[i].name() == "running_mean" || args[i].name() == "running_var")) w = true;
      written.push_back(w ? (args[i].is_out() ? 2 : 1) : 0);
      auto type = args[i].real_type()->str();
      if (type.find("Generator") != std::string::npos) generator = (int)i;
      if (type.find("ScalarType") != std::string::npos) scalar_types.push_back((int)i);
      if (args[i].name() == "half_to_float") half_to_float = (int)i;
    }
    random = generator >= 0 || short_name == "native_dropout";
  }
  void operator()(const OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    if (off) { original.callBoxed(handle, keys, stack); return; }
    calls.fetch_add(1, std::memory_order_relaxed);
    size_t n = op.schema().arguments().size(), begin = stack->size() - n;
    auto call = std::make_shared<Call>();
    call->op = &op; call->custom = &custom; call->cpu = cpu ? &*cpu : nullptr; call->name = name;
    std::optional<Device> device;
    auto slot = [&](int i, int j, const Tensor& t) {
      if (!on_device(t)) return false;
      if (!device) device = t.device();
      call->slots.push_back({i, j, Raw(t), written[(size_t)i] != 0, written[(size_t)i] == 2, {}, {}});
      return true;
    };
    std::vector<IValue> originals(stack->begin() + (long)begin, stack->end());
    for (size_t i = 0; i < n; ++i) {
      const IValue& v = originals[i];
      IValue given = v;
      if (v.isTensor()) { if (slot((int)i, -1, v.toTensor())) given = Tensor(); }
      else if (v.isTensorList()) {
        c10::List<Tensor> list;
        int j = 0;
        for (const Tensor& t : v.toTensorVector()) { list.push_back(slot((int)i, j, t) ? at::empty({0}, TensorOptions().device(kCPU)) : t); ++j; }
        given = list;
      } else if (v.isList() && v.toListRef().size() && op.schema().arguments()[i].type()->str().find("Tensor") != std::string::npos) {
        c10::List<std::optional<Tensor>> list;
        int j = 0;
        for (const IValue& e : v.toListRef()) {
          if (e.isTensor() && slot((int)i, j, e.toTensor())) list.push_back(std::optional<Tensor>(at::empty({0}, TensorOptions().device(kCPU))));
          else list.push_back(e.isTensor() ? std::optional<Tensor>(e.toTensor()) : std::nullopt);
          ++j;
        }
        given = list;
      } else if (v.isDevice() && v.toDevice().is_cuda()) { if (!device) device = v.toDevice(); given = Device(kCPU); }
      else if (v.isGenerator()) given = IValue();
      call->arguments.push_back(given);
    }
    if (!device) { original.callBoxed(handle, keys, stack); return; }
    if (device->index() < 0) device = Device(kCUDA, c10::cuda::current_device());
    if (tracing) simulated_tracef("cudanum: %s", name.c_str());
    call->upcast = name.find("nan_to_num") == std::string::npos;
    bool has_half = false;
    for (auto& s : call->slots) has_half = has_half || is_half(s.raw.dtype);
    for (int i : scalar_types)
      if (call->arguments[(size_t)i].isInt() && is_half((ScalarType)call->arguments[(size_t)i].toInt())) call->arguments[(size_t)i] = (int64_t)kFloat;
    if (half_to_float >= 0) call->arguments[(size_t)half_to_float] = false;
    c10::cuda::CUDAGuard guard(*device);
    auto stream = c10::cuda::getCurrentCUDAStream(device->index());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream.stream(), &status);
    bool capturing = status != cudaStreamCaptureStatusNone;
    if (random) {
      Generator g = generator >= 0 && originals[(size_t)generator].isGenerator() ? originals[(size_t)generator].toGenerator() : at::globalContext().defaultGenerator(*device);
      uint64_t offset = 0;
      if (g.device().is_cuda() && !capturing) offset = g.get_offset();
      call->seed = g.current_seed() * 0x9e3779b97f4a7c15ull + offset * 0xbf58476d1ce4e5b9ull + 17;
      call->generator = generator;
      if (generator < 0) call->arguments.push_back((int64_t)call->seed);  // for a custom function
    }
    // Work in the order of the stream.
    bool deferred = capturing || lazy;
    std::optional<Device> from;  // of a copy between devices, which the stream of the source makes
    if (lazy && !capturing && call->slots.size() == 2 && name == "aten::copy_" && originals[0].toTensor().device() != originals[1].toTensor().device()) from = originals[1].toTensor().device();
    auto enqueue = [&](void (*fn)(void*), const char* what) {
      if (!deferred) { fn(call.get()); return; }
      auto* held = new std::shared_ptr<Call>(call);
      auto* deferred_fn = fn == run_snap ? lazy_snap : lazy_compute;
      if (from) {
        auto source = c10::cuda::getCurrentCUDAStream(from->index());
        simulated_stream_op(from->index(), source.stream(), what, deferred_fn, held, lazy_drop, 0);
        simulated_join(device->index(), stream.stream(), from->index(), source.stream());
      } else simulated_stream_op(device->index(), stream.stream(), what, deferred_fn, held, lazy_drop, 0);
    };
    bool waits = false;
    if (lazy && !capturing)
      for (size_t i = 0; i < n; ++i) {
        IValue& v = call->arguments[i];
        if (!v.isTensor() || !v.toTensor().defined() || !v.toTensor().is_cpu() || !v.toTensor().numel() || !originals[i].isTensor() || originals[i].toTensor().is_cuda()) continue;
        bool pinned = v.toTensor().is_pinned();
        if (written[i]) waits = waits || !pinned || !(name == "aten::copy_" && originals[2].isBool() && originals[2].toBool());
        else if (!pinned) { NoGradGuard g; c10::impl::ExcludeDispatchKeyGuard e(c10::autograd_dispatch_keyset | c10::DispatchKeySet({DispatchKey::Python, DispatchKey::ADInplaceOrView})); v = v.toTensor().clone(); }
      }
    if (lazy && !capturing && mode == WithoutOriginal) cudaStreamSynchronize(stream.stream());
    bool snaps = false;
    for (auto& s : call->slots) snaps = snaps || (s.written && !s.is_out);
    for (auto& s : call->slots) if (s.is_out) for (auto& o : call->slots) snaps = snaps || (&o != &s && o.raw.overlaps(s.raw));
    if (mode == Missing) {
      note("no numbers for " + name);
      if (missing_raises()) TORCH_CHECK_NOT_IMPLEMENTED(false, "cudanum: no numbers for ", name);
      original.callBoxed(handle, keys, stack);
      return;
    }
    if (mode == WithoutOriginal && !capturing) {
      call->snap();
      place(*call, *device, *stack, begin, n, originals, has_half);
      return;
    }
    if (snaps) enqueue(run_snap, "cudanum snapshot");
    original.callBoxed(handle, keys, stack);
    // Where the outputs are.
    auto& returns = op.schema().returns();
    size_t at = stack->size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& v = (*stack)[at + i];
      auto* a = returns[i].alias_info();
      if (a && a->isWrite()) continue;
      if (v.isTensor() && on_device(v.toTensor())) call->outputs.emplace_back((int)i, Raw(v.toTensor()));
      else if (v.isTensorList()) {
        int j = 0;
        for (const Tensor& t : v.toTensorVector()) { if (on_device(t)) call->lists.emplace_back((int)i, j, Raw(t)); ++j; }
      }
    }
    for (auto& s : call->slots)
      if (s.is_out) {  // it may have another size now
        const IValue& v = originals[(size_t)s.argument];
        s.raw = Raw(s.element < 0 ? v.toTensor() : v.toTensorVector()[(size_t)s.element]);
      }
    enqueue(run_compute, "cudanum");
    if (lazy && !capturing) {
      for (auto& r : returns) waits = waits || r.type()->str().find("Tensor") == std::string::npos;
      if (waits) cudaStreamSynchronize(stream.stream());
    }
    if (!capturing && (!lazy || waits)) {
      for (size_t i = 0; i < returns.size(); ++i) {
        IValue& v = (*stack)[at + i];
        if (!v.isTensor() && !v.isTensorList() && !v.isNone() && i < call->results.size()) v = call->results[i];
      }
    }
  }
};

// -- reference implementations of what the CPU lacks ------------------------------------------------------------------------
static Tensor tensor_or_none(const IValue& v) { return v.isTensor() ? v.toTensor() : Tensor(); }
static Tensor as3d(const Tensor& x) { return x.reshape({x.size(0), x.size(1), -1}); }
static Tensor per_channel(const Tensor& v, const Tensor& x) { std::vector<int64_t> s((size_t)x.dim(), 1); s[1] = -1; return v.reshape(s); }
static std::vector<int64_t> all_but_channels(const Tensor& x) { std::vector<int64_t> d{0}; for (int64_t i = 2; i < x.dim(); ++i) d.push_back(i); return d; }
// As on the device: float32 stays float32 in the result, sums are made with more digits.
static Values bn_stats(Values& a) {
  Tensor x = a[0].toTensor();
  double eps = a[1].toDouble();
  Tensor d = x.to(kDouble);
  auto [var, mean] = at::var_mean(d, all_but_channels(x), c10::optional<int64_t>(0), false);  // Welford: exact for constants
  mean = at::where(mean.isfinite(), mean, d.mean(all_but_channels(x)));  // infinite, where few values meet in a thread
  // InvStd: zero if both are zero.
  Tensor invstd = eps == 0 ? at::where(var == 0, at::zeros_like(var), var.rsqrt()) : (var + eps).rsqrt();
  return {mean.to(x.scalar_type()), invstd.to(x.scalar_type())};
}
template <class A, class S> static void gather_loop(const Tensor& means, const Tensor& inverses, Tensor& mean, Tensor& inverse, const Tensor& rm, const Tensor& rv, A eps, A momentum, const Tensor& counts) {
  auto vm = means.contiguous(), vi = inverses.contiguous(), c = counts.contiguous();
  int64_t k = vm.size(0), n_features = vm.size(1);
  const A *pm = vm.const_data_ptr<A>(), *pi = vi.const_data_ptr<A>();
  const S* pc = c.const_data_ptr<S>();
  for (int64_t i = 0; i < n_features; ++i) {
    A avg = 0, var_n = 0;
    int n = 0;  // index_t of the kernel: counts are truncated
    for (int64_t j = 0; j < k; ++j) {
      S count = pc[j];
      A m = pm[j * n_features + i], v = A(1.0) / pi[j * n_features + i];
      v = (v * v - eps) * count;
      A factor = (A)(1.0 / (n + count));
      var_n += v + (avg - m) * (avg - m) * n * count * factor;
      avg = n * factor * avg + count * factor * m;
      { S next = n + count; n = next >= (S)2147483648.0 ? 2147483647 : (int)next; }  // as the device converts
    }
    mean.data_ptr<A>()[i] = avg;
    inverse.data_ptr<A>()[i] = A(1) / std::sqrt(var_n / n + eps);
    if (rm.defined()) { S& r = rm.data_ptr<S>()[i * rm.stride(0)]; r = (S)((1 - momentum) * r + momentum * avg); }
    A unbiased = var_n / (n - 1);
    if (rv.defined()) { S& r = rv.data_ptr<S>()[i * rv.stride(0)]; r = (S)((1 - momentum) * r + momentum * unbiased); }
  }
}
static Values bn_gather(Values& a, Tensor counts) {
  Tensor means = a[1].toTensor(), inverses = a[2].toTensor(), rm = tensor_or_none(a[3]), rv = tensor_or_none(a[4]);
  double momentum = a[5].toDouble(), eps = a[6].toDouble();
  Tensor mean = at::empty({means.size(1)}, means.options()), inverse = at::empty_like(mean);
  if (means.scalar_type() == kDouble) gather_loop<double, double>(means, inverses, mean, inverse, rm, rv, eps, momentum, counts.to(kDouble));
  else gather_loop<float, float>(means, inverses, mean, inverse, rm, rv, (float)eps, (float)momentum, counts.to(kFloat));
  return {mean, inverse};
}
static Values bn_gather_counts(Values& a) { return bn_gather(a, a[7].toTensor()); }
static Values bn_gather_count(Values& a) { return bn_gather(a, at::full({a[1].toTensor().size(0)}, a[7].toInt(), TensorOptions().dtype(kDouble))); }
static Tensor elemt(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& mean, const Tensor& inverse) {
  Tensor y = (x - per_channel(mean, x));
  if (w.defined()) y = y * per_channel(w, x);
  y = y * per_channel(inverse, x);
  return b.defined() ? y + per_channel(b, x) : y;
}
static Values bn_elemt(Values& a) { return {elemt(a[0].toTensor(), tensor_or_none(a[1]), tensor_or_none(a[2]), a[3].toTensor(), a[4].toTensor())}; }
static Values bn_elemt_out(Values& a) {
  Tensor out = a[6].toTensor();
  out.copy_(elemt(a[0].toTensor(), tensor_or_none(a[1]), tensor_or_none(a[2]), a[3].toTensor(), a[4].toTensor()));
  return {out};
}
static Values bn_backward_reduce(Values& a) {
  Tensor dy = a[0].toTensor(), x = a[1].toTensor(), mean = a[2].toTensor(), inverse = a[3].toTensor();
  auto dims = all_but_channels(x);
  Tensor d = dy.to(kDouble).reshape(x.sizes());
  Tensor sum_dy = d.sum(dims).to(mean.scalar_type());
  Tensor sum_dy_xmu = (d * (x.to(kDouble) - per_channel(mean.to(kDouble), x))).sum(dims).to(mean.scalar_type());
  // In channels_last the original returns all four, whatever is wanted.
  return {sum_dy, sum_dy_xmu, sum_dy_xmu * inverse, sum_dy};
}
static Values bn_backward_elemt(Values& a) {
  Tensor dy = a[0].toTensor(), x = a[1].toTensor(), mean = a[2].toTensor(), inverse = a[3].toTensor(), w = tensor_or_none(a[4]), sum_dy = a[5].toTensor(), sum_dy_xmu = a[6].toTensor();
  int64_t total = a[7].toTensor().sum().item<int64_t>();
  auto norm = 1.0 / (double)total;
  Tensor f2 = w.defined() ? w * inverse : inverse, f1 = inverse * inverse * sum_dy_xmu * norm;
  return {(dy.reshape(x.sizes()) - per_channel(sum_dy * norm, x) - (x - per_channel(mean, x)) * per_channel(f1, x)) * per_channel(f2, x)};
}
static Values cudnn_bn(Values& a) {  // input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
  auto [y, mean, inverse] = at::native_batch_norm(a[0].toTensor(), tensor_or_none(a[1]), tensor_or_none(a[2]), tensor_or_none(a[3]), tensor_or_none(a[4]), a[5].toBool(), a[6].toDouble(), a[7].toDouble());
  return {y, mean, inverse, at::empty({0}, TensorOptions().dtype(kByte))};
}
static Values cudnn_bn_backward(Values& a) {  // input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserve
  auto [dx, dw, db] = at::native_batch_norm_backward(a[1].toTensor(), a[0].toTensor(), a[2].toTensor(), tensor_or_none(a[3]), tensor_or_none(a[4]), tensor_or_none(a[5]), tensor_or_none(a[6]), true, a[7].toDouble(), {true, true, true});
  return {dx, dw, db};
}
static Values cudnn_conv(Values& a) {  // self, weight, padding, stride, dilation, groups, ...
  auto p = a[2].toIntVector(), s = a[3].toIntVector(), d = a[4].toIntVector();
  return {at::convolution(a[0].toTensor(), a[1].toTensor(), {}, s, p, d, false, std::vector<int64_t>(p.size(), 0), a[5].toInt())};
}
static Values cudnn_conv_transpose(Values& a) {  // self, weight, padding, output_padding, stride, dilation, groups
  return {at::convolution(a[0].toTensor(), a[1].toTensor(), {}, a[4].toIntVector(), a[2].toIntVector(), a[5].toIntVector(), true, a[3].toIntVector(), a[6].toInt())};
}
static Values depthwise(Values& a) {  // self, weight, kernel_size, bias, stride, padding, dilation
  return {at::convolution(a[0].toTensor(), a[1].toTensor(), tensor_or_none(a[3]), a[4].toIntVector(), a[5].toIntVector(), a[6].toIntVector(), false, std::vector<int64_t>(a[5].toIntVector().size(), 0), a[0].toTensor().size(1))};
}
static Values depthwise_out(Values& a) { Tensor out = a[7].toTensor(); Values r = depthwise(a); out.copy_(r[0].toTensor()); return {out}; }
static Values own_dropout(Values& a) {  // input, p, train, and the seed
  Tensor x = a[0].toTensor();
  double p = a[1].toDouble();
  bool train = a[2].isNone() || a[2].toBool();
  if (p == 0 || !train || !x.numel()) return {x.clone(), at::ones_like(x, TensorOptions().dtype(kBool))};
  if (p == 1) return {at::zeros_like(x), at::zeros_like(x, TensorOptions().dtype(kBool))};
  Tensor mask = at::empty(x.sizes(), TensorOptions().dtype(kBool)).bernoulli_(1 - p, at::make_generator<CPUGeneratorImpl>((uint64_t)a.back().toInt()));
  return {x * mask * (1 / (1 - p)), mask};
}
static Values fused_dropout(Values& a) {  // self, p (to keep), generator
  Tensor x = a[0].toTensor();
  double p = a[1].toDouble();
  Tensor mask = at::empty(x.sizes(), TensorOptions().dtype(kByte)).bernoulli_(p, a[2].toGenerator());
  return {x * mask * (1 / p), mask};
}
static Values math_attention(Values&) { return {(int64_t)0}; }

static std::map<std::string, Custom> customs() {
  return {
      {"batch_norm_stats", bn_stats},
      {"batch_norm_gather_stats_with_counts", bn_gather_counts},
      {"batch_norm_gather_stats", bn_gather_count},
      {"batch_norm_elemt", bn_elemt},
      {"batch_norm_elemt.out", bn_elemt_out},
      {"batch_norm_backward_reduce", bn_backward_reduce},
      {"batch_norm_backward_elemt", bn_backward_elemt},
      {"cudnn_batch_norm", cudnn_bn},
      {"cudnn_batch_norm_backward", cudnn_bn_backward},
      {"cudnn_convolution", cudnn_conv},
      {"cudnn_convolution_transpose", cudnn_conv_transpose},
      {"_conv_depthwise2d", depthwise},
      {"_conv_depthwise2d.out", depthwise_out},
      {"conv_depthwise3d", depthwise},
      {"native_dropout", own_dropout},
      {"_fused_dropout", fused_dropout},
      {"_fused_sdp_choice", math_attention},
  };
}
static bool begins(const std::string& s, std::initializer_list<const char*> all) { for (auto* p : all) if (s.rfind(p, 0) == 0) return true; return false; }
static bool left_alone(const std::string& name, const OperatorHandle& op) {
  static const std::set<std::string> names = {
      "record_stream", "_local_scalar_dense", "is_pinned", "_pin_memory", "pin_memory", "is_set_to", "_has_same_storage_numel", "resize_", "_resize_output_", "set_", "set_.source_Storage",
      "set_.source_Storage_storage_offset", "set_.source_Tensor", "_cudnn_init_dropout_state", "_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_nested_tensor_size", "_cuda_getCurrentRawStream",
      "_is_any_true", "cudnn_is_acceptable", "_debug_has_internal_overlap", "_efficientzerotensor", "resize_as_", "_foreach_norm_dummy", "to_padded_tensor", "_cufft_get_plan_cache_size"};
  if (names.count(name) || begins(name, {"empty", "_empty", "new_empty", "_cufft", "_sparse", "sparse", "_nested", "_cslt", "_flash", "_efficient_attention", "to_sparse", "_to_sparse", "_coalesce", "_indices", "_values", "values", "indices"})) return true;
  for (auto& r : op.schema().returns()) {
    auto* a = r.alias_info();
    if (a && !a->isWrite()) return true;  // views
  }
  return false;
}
static bool without_original(const std::string& name) {
  return begins(name, {"nonzero", "masked_select", "unique", "_unique", "bincount", "repeat_interleave", "embedding_dense_backward", "_embedding_bag", "linalg_", "_linalg", "cholesky", "_cholesky", "geqrf", "ormqr", "lu_", "triangular_solve", "_fft",
                       "histc", "_ctc_loss", "equal", "mode", "randperm", "multinomial", "_histogramdd", "segment_reduce", "median", "nanmedian", "_cudnn_ctc"});
}

static std::vector<Shadow*>& all() { static auto* v = new std::vector<Shadow*>; return *v; }
extern "C" __attribute__((visibility("default"))) int simulated_values_install() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto custom = customs();
  auto names = dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA);
  for (const char* more : {"copy_"}) names.push_back(c10::OperatorName(std::string("aten::") + more, ""));
  int count = 0;
  for (auto& full : names) {
    if (full.name.rfind("aten::", 0)) continue;
    std::string name = full.name.substr(6) + (full.overload_name.empty() ? "" : "." + full.overload_name);
    auto found = dispatcher.findSchema(full);
    if (!found || left_alone(name, *found)) continue;
    Custom own = custom.count(name) ? custom[name] : Custom();
    bool has_cpu = found->hasComputedKernelForDispatchKey(DispatchKey::CPU);
    Mode mode = !own && !has_cpu ? Missing : without_original(name) ? WithoutOriginal : Usual;
    if (getenv("SIMULATED_NUMBERS_LIST") && mode != Usual) fprintf(stderr, "[cudanum] %s %s\n", mode == Missing ? "missing" : "without original", name.c_str());
    try {
      auto shadow = std::make_unique<Shadow>(found->getComputedKernelForDispatchKey(DispatchKey::CUDA), *found, own, mode);
      if (!own && has_cpu) shadow->cpu = found->getComputedKernelForDispatchKey(DispatchKey::CPU);
      all().push_back(shadow.get());
      library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(shadow)));
      ++count;
    } catch (std::exception& e) { fprintf(stderr, "[cudanum] %s: %s\n", name.c_str(), e.what()); }
  }
  return count;
}
extern "C" __attribute__((visibility("default"))) void simulated_values_off(int by) { off += by; }
extern "C" __attribute__((visibility("default"))) const char* simulated_values_notes() {
  static thread_local std::string s;
  std::lock_guard<std::mutex> g(lock());
  s.clear();
  for (auto& [k, n] : notes()) s += std::to_string(n) + "\t" + k + "\n";
  return s.c_str();
}
extern "C" __attribute__((visibility("default"))) const char* simulated_values_calls() {
  static thread_local std::string s;
  s.clear();
  for (auto* x : all()) if (x->calls) s += std::to_string(x->calls) + "\t" + x->name + "\n";
  return s.c_str();
}
