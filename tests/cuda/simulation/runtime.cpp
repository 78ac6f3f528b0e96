// A CUDA runtime without a GPU: memory of the host stands for that of the devices, copies are real, kernels do nothing.
// Everything that a stream is given is done at once, in the thread that gives it. With SIMULATED_KERNEL_US (and SIMULATED_COPY_US)
// streams have a clock: work is complete only when the clock says so, and waits take time.
//
// Environment: SIMULATED_GPUS (2), SIMULATED_TRACE=1 (prints calls), SIMULATED_STACK=1 (Python stack of each host wait),
// SIMULATED_CC (90), SIMULATED_KERNEL_US (0), SIMULATED_COPY_US (0).
// ctypes: simulated_reset(), simulated_report(), simulated_log_start(), simulated_log().
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>
#include "simulation.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
typedef cudaError_t E;

// ---- time, settings --------------------------------------------------------------------------------------------------
static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}
static double setting(const char* name, double otherwise) {
  const char* v = getenv(name);
  return v && *v ? atof(v) : otherwise;
}
static const bool tracing = setting("SIMULATED_TRACE", 0) != 0;
static const bool stacks = setting("SIMULATED_STACK", 0) != 0;
static double kernel_us = setting("SIMULATED_KERNEL_US", 0), copy_us = setting("SIMULATED_COPY_US", 0);
static const int cc = (int)setting("SIMULATED_CC", 90);
static const size_t GB = 1ull << 30, DEVICE_MEMORY = (size_t)setting("SIMULATED_GB", 80) * GB;

EXPORT int simulated_trace() { return tracing; }
EXPORT void simulated_tracef(const char* format, ...) {
  char text[2000], name[20] = "";
  prctl(PR_GET_NAME, name);
  int n = snprintf(text, sizeof text, "[fake %d %s] ", getpid(), name);
  va_list a;
  va_start(a, format);
  n += vsnprintf(text + n, sizeof text - n - 2, format, a);
  va_end(a);
  if (n > (int)sizeof text - 2) n = sizeof text - 2;
  text[n++] = '\n';
  (void)!write(2, text, n);
}
#define TRACE(...) do { if (tracing) simulated_tracef(__VA_ARGS__); } while (0)
EXPORT void simulated_set_times(double kernel, double copy) { kernel_us = kernel; copy_us = copy; }

// ---- counters --------------------------------------------------------------------------------------------------------
static std::atomic<simulated_counter*> counters{nullptr};
static std::mutex& named_lock() { static auto* m = new std::mutex; return *m; }
static std::map<std::string, long long>& named() { static auto* m = new std::map<std::string, long long>; return *m; }
static std::vector<std::string>* the_log = nullptr;
static std::mutex& log_lock() { static auto* m = new std::mutex; return *m; }

EXPORT void simulated_register(simulated_counter* c) {
  c->next = counters.load();
  while (!counters.compare_exchange_weak(c->next, c)) {}
}
EXPORT void simulated_count(const char* name, long long by) {
  std::lock_guard<std::mutex> g(named_lock());
  named()[name] += by;
}
static void note(const std::string& what) {
  if (!the_log) return;
  std::lock_guard<std::mutex> g(log_lock());
  if (the_log) the_log->push_back(what);
}
EXPORT void simulated_note(const char* what) { note(what); }

// ---- kernels ---------------------------------------------------------------------------------------------------------
struct Func {
  std::string mangled;
  std::atomic<long long> n{0}, captured{0};
  int max_dynamic = 48 * 1024;
  bool counts_nonzero = false;
  std::vector<int> words;  // of each parameter: how many pointers it begins with, -1 for one that may be to anything
  std::once_flag once;
};
static std::shared_mutex& funcs_lock() { static auto* m = new std::shared_mutex; return *m; }
static std::unordered_map<const void*, Func*>& funcs() { static auto* m = new std::unordered_map<const void*, Func*>; return *m; }
static std::unordered_map<const void*, std::pair<void*, size_t>>& vars() {
  static auto* m = new std::unordered_map<const void*, std::pair<void*, size_t>>;
  return *m;
}
static std::string demangled(const std::string& m) {
  int status = 0;
  char* d = abi::__cxa_demangle(m.c_str(), nullptr, nullptr, &status);
  std::string s = status == 0 && d ? d : m;
  free(d);
  return s;
}

// ---- errors ----------------------------------------------------------------------------------------------------------
static thread_local E last_error = cudaSuccess;
static bool forked = false;
static std::atomic<bool> used{false};
static E fail(const char* fn, E e) {
  if (e != cudaSuccess && e != cudaErrorNotReady) {
    last_error = e;
    simulated_count((std::string("errors/") + fn + ": " + cudaGetErrorName(e)).c_str(), 1);
    note(std::string("error ") + fn + " " + cudaGetErrorName(e));
    TRACE("%s -> error %s", fn, cudaGetErrorName(e));
  }
  return e;
}
#define ENTER()                                                                          \
  do {                                                                                   \
    static simulated_counter c_{nullptr, {0}, nullptr};                                       \
    static bool r_ = (c_.name = strdup((std::string("calls/") + __func__).c_str()), simulated_register(&c_), true); \
    (void)r_;                                                                            \
    c_.n.fetch_add(1, std::memory_order_relaxed);                                        \
    if (tracing) simulated_tracef("%s", __func__);                                            \
    if (forked) return fail(__func__, cudaErrorInitializationError);                     \
  } while (0)
#define FAIL(e) return fail(__func__, e)
#define CHECK(e) do { E e_ = (e); if (e_ != cudaSuccess) return fail(__func__, e_); } while (0)

// ---- devices ---------------------------------------------------------------------------------------------------------
static int count_devices() {
  int n = (int)setting("SIMULATED_GPUS", 2);
  const char* v = getenv("CUDA_VISIBLE_DEVICES");
  if (!v) return n;
  int seen = 0;
  for (const char* p = v; *p;) {
    char* end;
    long i = strtol(p, &end, 10);
    if (end == p || i < 0 || i >= n) break;
    ++seen;
    p = *end == ',' ? end + 1 : end;
    if (*end && *end != ',') break;
  }
  return seen;
}
static int devices() { static int n = count_devices(); return n; }
EXPORT int simulated_device_count() { return devices(); }
static thread_local int device = 0;
EXPORT int simulated_device() { return device; }
static std::atomic<bool> contexts[64];
static std::set<std::pair<int, int>> peers;  // (from, to) with access enabled

// ---- memory ----------------------------------------------------------------------------------------------------------
// Each device has one arena, a sparse file in memory, so that another process can map a part of it (cudaIpc).
struct Arena {
  int fd = -1;
  char* base = nullptr;
  size_t in_use = 0;
  std::map<size_t, size_t> free_, used_;  // offset -> size
};
static const size_t ARENA = 256 * GB;
static std::recursive_mutex& lock() { static auto* m = new std::recursive_mutex; return *m; }
typedef std::lock_guard<std::recursive_mutex> Guard;
static Arena& arena(int d) {
  static auto* all = new Arena[64];
  Arena& a = all[d];
  if (!a.base) {
    a.fd = (int)syscall(SYS_memfd_create, "fakegpu", 1 /* MFD_CLOEXEC */);
    if (a.fd < 0 || ftruncate(a.fd, (off_t)ARENA)) { perror("fake cudart: memfd"); abort(); }
    a.base = (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a.fd, 0);
    if (a.base == MAP_FAILED) { perror("fake cudart: mmap"); abort(); }
    a.free_[0] = ARENA;
  }
  return a;
}
struct Region { size_t size; int kind; int device; bool ours; unsigned flags; };  // kind: 1 pinned, 2 device of another process, 3 managed
static std::map<uintptr_t, Region>& regions() { static auto* m = new std::map<uintptr_t, Region>; return *m; }
static std::shared_mutex& regions_lock() { static auto* m = new std::shared_mutex; return *m; }
struct Place { int kind; int device; uintptr_t base; size_t size; };  // kind: 0 pageable, 1 pinned, 2 device, 3 managed
static std::atomic<char*> bases[64];

static Place place_of(const void* p) {
  for (int d = 0; d < devices(); ++d) {
    char* b = bases[d].load(std::memory_order_acquire);
    if (b && (char*)p >= b && (char*)p < b + ARENA) return {2, d, (uintptr_t)b, ARENA};
  }
  std::shared_lock<std::shared_mutex> g(regions_lock());
  auto it = regions().upper_bound((uintptr_t)p);
  if (it != regions().begin()) {
    --it;
    if ((uintptr_t)p < it->first + it->second.size) return {it->second.kind, it->second.device, it->first, it->second.size};
  }
  return {0, -1, 0, 0};
}
static void* device_malloc(int d, size_t n) {
  Guard g(lock());
  Arena& a = arena(d);
  bases[d].store(a.base, std::memory_order_release);
  n = (n + 511) & ~(size_t)511;
  if (!n) n = 512;
  if (a.in_use + n > DEVICE_MEMORY) return nullptr;
  for (auto it = a.free_.begin(); it != a.free_.end(); ++it) {
    if (it->second < n) continue;
    size_t at = it->first, rest = it->second - n;
    a.free_.erase(it);
    if (rest) a.free_[at + n] = rest;
    a.used_[at] = n;
    a.in_use += n;
    return a.base + at;
  }
  return nullptr;
}
static bool device_free(int d, void* p) {
  Guard g(lock());
  Arena& a = arena(d);
  auto it = a.used_.find((size_t)((char*)p - a.base));
  if (it == a.used_.end()) return false;
  size_t at = it->first, n = it->second;
  a.used_.erase(it);
  a.in_use -= n;
  size_t from = (at + 4095) & ~(size_t)4095, to = (at + n) & ~(size_t)4095;
  if (to > from) fallocate(a.fd, 0x03 /* PUNCH_HOLE | KEEP_SIZE */, (off_t)from, (off_t)(to - from));
  if (from > at) memset(a.base + at, 0, std::min(from, at + n) - at);
  if (to < at + n && to >= from) memset(a.base + to, 0, at + n - to);
  auto next = a.free_.lower_bound(at);
  if (next != a.free_.end() && at + n == next->first) { n += next->second; next = a.free_.erase(next); }
  if (next != a.free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == at) { before->second += n; return true; }
  }
  a.free_[at] = n;
  return true;
}

// ---- graphs, streams, events, captures -------------------------------------------------------------------------------
// With SIMULATED_LAZY=1, what a stream is given is done only when somebody waits for it: missing waits give wrong numbers.
static const bool lazy = setting("SIMULATED_LAZY", 0) != 0;
static const double lazy_age = setting("SIMULATED_LAZY_AGE_US", 20000);
EXPORT int simulated_is_lazy() { return lazy; }
struct Stream;
struct Item { std::function<void()> run; Stream* wait; long long upto; };
struct Node { std::string kind, name; std::function<void()> run; double us = 0; };
struct Graph { std::vector<Node> nodes; unsigned magic = 0x6a9f; };
struct Exec { std::vector<Node> nodes; };
struct Stream;
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  Stream* origin;
  pthread_t owner;
  Graph* graph = new Graph;
  std::map<Stream*, std::map<Stream*, long>> clock;  // of each stream in it: the last operation of each that comes before
  std::map<Stream*, long> ops;
};
struct Stream {
  unsigned magic = 0x57ea;
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  double ready = 0;
  unsigned long long id = 0;
  std::shared_ptr<Capture> capture;
  std::atomic<long long> launches{0};
  std::deque<Item> items;
  long long queued = 0, done = 0;
};
struct Event {
  unsigned magic = 0xe4e7;
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  double time = 0;
  std::shared_ptr<Capture> capture;
  std::map<Stream*, long> clock;
  Stream* stream = nullptr;
  long long upto = 0;
};
static std::vector<std::shared_ptr<Capture>>& active() { static auto* v = new std::vector<std::shared_ptr<Capture>>; return *v; }
static std::unordered_set<void*>& live() { static auto* v = new std::unordered_set<void*>; return *v; }
static std::atomic<unsigned long long> ids{1};
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static std::atomic<int> captures{0};

static Stream* default_stream(int d) {
  static auto* all = new Stream*[64]();
  Guard g(lock());
  if (!all[d]) { all[d] = new Stream; all[d]->device = d; all[d]->id = ids++; }
  return all[d];
}
static Stream* stream_of(cudaStream_t s) {
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) return default_stream(device);
  Stream* p = (Stream*)s;
  Guard g(lock());
  return live().count(p) && p->magic == 0x57ea ? p : nullptr;
}
static void invalidate(Capture& c) { c.status = cudaStreamCaptureStatusInvalidated; }
// Whether this thread may not make a call that is unsafe while something is captured. Then the captures are lost.
static bool prohibited() {
  if (!captures.load() || thread_mode == cudaStreamCaptureModeRelaxed) return false;
  Guard g(lock());
  bool found = false;
  for (auto& c : active()) {
    bool own = pthread_equal(c->owner, pthread_self());
    if ((own && c->mode != cudaStreamCaptureModeRelaxed) ||
        (!own && thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal)) {
      invalidate(*c);
      found = true;
    }
  }
  return found;
}
#define UNSAFE() do { if (prohibited()) return fail(__func__, cudaErrorStreamCaptureUnsupported); } while (0)

static std::string thread_name() {
  char name[20] = "";
  prctl(PR_GET_NAME, name);
  return name;
}
static void print_python_stack(const char* what) {
  static auto dump = (void (*)(int, void*))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  static auto state = (void* (*)())dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  simulated_tracef("host wait: %s", what);
  if (dump && state && state()) dump(2, state());
}
static void waited(const char* what, double until) {
  std::string name = std::string("waits/") + what + " in " + thread_name();
  simulated_count(name.c_str(), 1);
  note(std::string("WAIT ") + what);
  if (stacks) print_python_stack(what);
  double rest = until - now();
  if (rest > 0) {
    timespec t{(time_t)(rest / 1e6), (long)((rest - (long)(rest / 1e6) * 1e6) * 1e3)};
    nanosleep(&t, nullptr);
  }
}

static std::recursive_mutex& exec_lock() { static auto* m = new std::recursive_mutex; return *m; }
static void drain(Stream* s, long long upto) {
  if (!lazy || !s) return;
  std::lock_guard<std::recursive_mutex> g(exec_lock());
  for (;;) {
    Item item;
    {
      Guard g2(lock());
      if (s->done >= upto || s->items.empty()) return;
      item = std::move(s->items.front());
      s->items.pop_front();
    }
    if (item.wait) drain(item.wait, item.upto);
    else if (item.run) item.run();
    Guard g2(lock());
    ++s->done;
  }
}
static void drain(Stream* s) { if (lazy && s) { long long n; { Guard g(lock()); n = s->queued; } drain(s, n); } }
static void drain_device(int d) {
  if (!lazy) return;
  std::vector<Stream*> all;
  { Guard g(lock());
    for (void* p : live()) if (*(unsigned*)p == 0x57ea && (d < 0 || ((Stream*)p)->device == d)) all.push_back((Stream*)p);
    for (int i = 0; i < devices(); ++i) if (d < 0 || i == d) all.push_back(default_stream(i)); }
  for (Stream* s : all) drain(s);
}
static void push(Stream* s, Item i) { Guard g(lock()); s->items.push_back(std::move(i)); ++s->queued; }
// Lets a stream wait for all that another one has been given.
EXPORT void simulated_join(int to_device, void* to, int from_device, void* from) {
  Stream *a = to ? (Stream*)to : default_stream(to_device), *b = from ? (Stream*)from : default_stream(from_device);
  if (lazy && a != b) push(a, {nullptr, b, b->queued});
}
// Does a piece of work in order of a stream: now, or when the graph that the stream is captured into is launched.
static E enqueue(const char* fn, Stream* s, const char* kind, const std::string& name, double us, std::function<void()> run) {
  std::unique_lock<std::recursive_mutex> g(lock());
  if (s->capture) {
    Capture& c = *s->capture;
    if (c.status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
    c.graph->nodes.push_back({kind, name, std::move(run), us});
    c.clock[s][s] = ++c.ops[s];
    simulated_count((std::string("captured/") + kind).c_str(), 1);
    return cudaSuccess;
  }
  if (captures.load() && !(s->flags & cudaStreamNonBlocking)) {
    // Legacy streams, and blocking ones, would depend on each other.
    for (auto& c : active())
      if (c->origin->device == s->device && !(c->origin->flags & cudaStreamNonBlocking)) {
        invalidate(*c);
        return cudaErrorStreamCaptureImplicit;
      }
  }
  if (us > 0) s->ready = std::max(now(), s->ready) + us;
  if (lazy && run) { s->items.push_back({std::move(run), nullptr, 0}); ++s->queued; return cudaSuccess; }
  g.unlock();
  if (run) run();
  return cudaSuccess;
}
EXPORT int simulated_stream_op(int dev, void* stream, const char* name, void (*fn)(void*), void* arg, void (*drop)(void*), double us) {
  Stream* s = stream ? stream_of((cudaStream_t)stream) : default_stream(dev);
  if (!s) return fail("simulated_stream_op", cudaErrorInvalidResourceHandle);
  if (*name) note(name);
  std::shared_ptr<void> held(arg, drop);
  return fail("simulated_stream_op", enqueue("simulated_stream_op", s, *name ? "collective" : "end of collective", name, us, [fn, held] { fn(held.get()); }));
}
static double driver_launch_us() { return kernel_us; }
EXPORT int simulated_driver_launch(void* stream, const char* name) {
  Stream* s = stream_of((cudaStream_t)stream);
  if (!s) return 400;
  simulated_count((std::string(s->capture ? "captured/kernel " : "launches/") + name).c_str(), 1);
  note(std::string("kernel ") + name);
  return enqueue("cuLaunchKernel", s, "kernel", name, driver_launch_us(), nullptr);
}

// ---- registration by the code that nvcc makes ------------------------------------------------------------------------
EXPORT void** __cudaRegisterFatBinary(void* f) { return (void**)malloc(64); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterFunction(void** h, const char* host, char* dev, const char* name, int limit, uint3*, uint3*, dim3*, dim3*, int*) {
  std::unique_lock<std::shared_mutex> g(funcs_lock());
  Func*& f = funcs()[host];
  if (!f) f = new Func;
  f->mangled = name;
  f->counts_nonzero = strstr(name, "DeviceReduceSingleTileKernel") && strstr(name, "NonZeroOp");
}
EXPORT void __cudaRegisterVar(void** h, char* host, char* dev, const char* name, int ext, size_t size, int constant, int global) {
  std::unique_lock<std::shared_mutex> g(funcs_lock());
  vars()[host] = {calloc(1, size ? size : 1), size};
}
EXPORT void __cudaRegisterManagedVar(void** h, void** host, char* dev, const char* name, int, size_t size, int, int) { *host = calloc(1, size); }
EXPORT void __cudaRegisterHostVar(void**, const char*, char*, size_t) {}
EXPORT void __cudaRegisterTexture(void**, const void*, const void**, const char*, int, int, int) {}
EXPORT void __cudaRegisterSurface(void**, const void*, const void**, const char*, int, int) {}
static Func* func_of(const void* p) {
  std::shared_lock<std::shared_mutex> g(funcs_lock());
  auto it = funcs().find(p);
  return it == funcs().end() ? nullptr : it->second;
}
struct Config { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local std::vector<Config>* configs;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  if (!configs) configs = new std::vector<Config>;
  configs->push_back({grid, block, shared, stream});
  return 0;
}
EXPORT E __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (!configs || configs->empty()) FAIL(cudaErrorMissingConfiguration);
  Config& c = configs->back();
  *grid = c.grid; *block = c.block; *shared = c.shared; *(cudaStream_t*)stream = c.stream;
  configs->pop_back();
  return cudaSuccess;
}

// Parameters of a kernel that point to memory of another device, or of the host. A GPU would need peer access, or fault.
static std::vector<int> words_of(const std::string& name) {
  std::vector<int> words;
  int depth = 0;
  size_t end = name.rfind(')');
  if (end == std::string::npos) return words;
  size_t begin = end;
  for (depth = 1; begin > 0 && depth > 0;) {
    --begin;
    if (name[begin] == ')') ++depth;
    if (name[begin] == '(') --depth;
  }
  std::string list = name.substr(begin + 1, end - begin - 1), one;
  auto done = [&] {
    size_t a = one.find("std::array<char*, ");
    if (one.empty()) return;
    bool pointer = one.back() == '*' || one.find("TensorAccessor<") != std::string::npos;
    words.push_back(a == 0 || a == 1 ? atoi(one.c_str() + a + 18) : pointer ? -1 : 0);
    one.clear();
  };
  depth = 0;
  for (char c : list) {
    if (c == '<' || c == '(' || c == '[' || c == '{') ++depth;
    if (c == '>' || c == ')' || c == ']' || c == '}') --depth;
    if (c == ',' && depth == 0) done(); else one += c;
  }
  done();
  return words;
}
static void check_pointers(Func* f, void** args, int dev) {
  std::call_once(f->once, [&] { f->words = words_of(demangled(f->mangled)); });
  for (size_t i = 0; i < f->words.size(); ++i) {
    int n = f->words[i];
    for (int w = 0; w < std::abs(n); ++w) {
      void* p = ((void**)args[i])[w];
      if (!p) continue;
      Place at = place_of(p);
      std::string what;
      if (at.kind == 2 && at.size == ARENA && at.device != dev) what = "memory of another device";
      else if (n > 0 && at.kind == 0) what = "memory of the host";
      if (what.empty()) continue;
      simulated_count(("pointers/" + what + ", parameter " + std::to_string(i) + "." + std::to_string(w) + " of " + demangled(f->mangled).substr(0, 150)).c_str(), 1);
      if (stacks) print_python_stack("a kernel gets memory of another device");
    }
  }
}
// ---- launches --------------------------------------------------------------------------------------------------------
static std::atomic<long long> total_launches{0};
static E launch(const char* fn, Func* f, dim3 g, dim3 b, size_t shared, cudaStream_t stream, void** args) {
  if (!f) return cudaErrorInvalidDeviceFunction;
  if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z) return cudaErrorInvalidConfiguration;
  if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 || b.x > 1024 || b.y > 1024 || b.z > 64 ||
      (size_t)b.x * b.y * b.z > 1024)
    return cudaErrorInvalidConfiguration;
  if (shared > (size_t)std::max(f->max_dynamic, 48 * 1024)) return cudaErrorInvalidValue;
  Stream* s = stream_of(stream);
  if (!s || s->device != device) return cudaErrorInvalidResourceHandle;
  contexts[device] = true;
  bool capturing = (bool)s->capture;
  if (tracing) simulated_tracef("kernel %s <<<(%u,%u,%u),(%u,%u,%u),%zu,%p>>> on %d", demangled(f->mangled).c_str(), g.x, g.y, g.z, b.x, b.y, b.z, shared, (void*)stream, device);
  if (args) check_pointers(f, args, device);
  std::function<void()> run;
  if (f->counts_nonzero) {  // the size of a result depends on it: all are taken as nonzero, as masks of ranks with data are
    int *out = *(int**)args[1], n = *(int*)args[2];
    run = [=] { *out = n; };
  }
  E e = enqueue(fn, s, "kernel", f->mangled, kernel_us, run);
  if (e) return e;
  (capturing ? f->captured : f->n).fetch_add(1, std::memory_order_relaxed);
  s->launches.fetch_add(1, std::memory_order_relaxed);
  total_launches.fetch_add(1, std::memory_order_relaxed);
  if (the_log) note("kernel " + demangled(f->mangled));
  return cudaSuccess;
}
EXPORT E cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** args, size_t shared, cudaStream_t s) {
  ENTER();
  CHECK(launch(__func__, func_of(f), g, b, shared, s, args));
  return cudaSuccess;
}
EXPORT E cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** args, size_t shared, cudaStream_t s) {
  ENTER();
  CHECK(launch(__func__, func_of(f), g, b, shared, s, args));
  return cudaSuccess;
}
EXPORT E cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) {
  ENTER();
  CHECK(launch(__func__, func_of(f), c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream, args));
  return cudaSuccess;
}
// A cudaKernel_t is a Func here.
EXPORT E __cudaGetKernel(cudaKernel_t* k, const void* f) {
  Func* found = func_of(f);
  if (!found) FAIL(cudaErrorInvalidDeviceFunction);
  *k = (cudaKernel_t)found;
  return cudaSuccess;
}
EXPORT E __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** args, size_t shared, cudaStream_t s) {
  ENTER();
  CHECK(launch(__func__, (Func*)k, g, b, shared, s, args));
  return cudaSuccess;
}
EXPORT E __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 g, dim3 b, void** args, size_t shared, cudaStream_t s) {
  return __cudaLaunchKernel(k, g, b, args, shared, s);
}
EXPORT E cudaGetFuncBySymbol(cudaFunction_t* out, const void* f) {
  Func* found = func_of(f);
  if (!found) FAIL(cudaErrorInvalidDeviceFunction);
  *out = (cudaFunction_t)found;
  return cudaSuccess;
}
EXPORT E cudaFuncGetAttributes(cudaFuncAttributes* a, const void* f) {
  ENTER();
  Func* found = func_of(f);
  if (!found) FAIL(cudaErrorInvalidDeviceFunction);
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = cc;
  a->maxDynamicSharedSizeBytes = found->max_dynamic;
  a->preferredShmemCarveout = -1;
  return cudaSuccess;
}
EXPORT E cudaFuncSetAttribute(const void* f, cudaFuncAttribute a, int value) {
  ENTER();
  Func* found = func_of(f);
  if (!found) FAIL(cudaErrorInvalidDeviceFunction);
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > (cc >= 90 ? 227 : 163) * 1024) FAIL(cudaErrorInvalidValue);
    found->max_dynamic = value;
  }
  return cudaSuccess;
}
EXPORT E cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
EXPORT E cudaFuncGetName(const char** name, const void* f) {
  Func* found = func_of(f);
  if (!found) FAIL(cudaErrorInvalidDeviceFunction);
  *name = found->mangled.c_str();
  return cudaSuccess;
}
EXPORT E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int block, size_t shared, unsigned) {
  ENTER();
  if (!func_of(f)) FAIL(cudaErrorInvalidDeviceFunction);
  *n = block > 0 && block <= 1024 ? 2048 / block : 0;
  if (*n > 32) *n = 32;
  if (shared) *n = std::min<size_t>(*n, 227 * 1024 / shared);
  return cudaSuccess;
}
EXPORT E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0);
}
EXPORT E cudaOccupancyMaxActiveClusters(int* n, const void*, const cudaLaunchConfig_t*) { *n = 8; return cudaSuccess; }
EXPORT E cudaOccupancyMaxPotentialClusterSize(int* n, const void*, const cudaLaunchConfig_t*) { *n = 8; return cudaSuccess; }
EXPORT E cudaOccupancyAvailableDynamicSMemPerBlock(size_t* n, const void*, int, int) { *n = 48 * 1024; return cudaSuccess; }

// ---- devices, errors, versions ---------------------------------------------------------------------------------------
EXPORT E cudaGetDeviceCount(int* n) {
  *n = devices();
  if (forked && used) FAIL(cudaErrorInitializationError);
  if (!*n) FAIL(cudaErrorNoDevice);
  return cudaSuccess;
}
EXPORT E cudaGetDevice(int* d) { *d = device; return cudaSuccess; }
static void in_child() { if (used) forked = true; }
static void in_use() {
  if (!used.exchange(true)) pthread_atfork(nullptr, nullptr, in_child);
}
EXPORT E cudaSetDevice(int d) {
  ENTER();
  if (d < 0 || d >= devices()) FAIL(cudaErrorInvalidDevice);
  device = d;
  contexts[d] = true;
  in_use();
  return cudaSuccess;
}
EXPORT E cudaInitDevice(int d, unsigned, unsigned) {
  if (d < 0 || d >= devices()) FAIL(cudaErrorInvalidDevice);
  contexts[d] = true;
  return cudaSuccess;
}
EXPORT E cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
EXPORT E cudaGetDeviceFlags(unsigned* f) { *f = 0; return cudaSuccess; }
EXPORT E cudaSetValidDevices(int*, int) { return cudaSuccess; }
EXPORT E cudaDeviceReset() { ENTER(); return cudaSuccess; }
EXPORT int simulated_has_context(int d) { return contexts[d]; }
EXPORT E cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  ENTER();
  if (d < 0 || d >= devices()) FAIL(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Fake GPU");
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = (char)(i + d + 1);
  p->totalGlobalMem = DEVICE_MEMORY;
  p->sharedMemPerBlock = 48 * 1024;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = cc / 10; p->minor = cc % 10;
  p->textureAlignment = 512; p->texturePitchAlignment = 32;
  p->multiProcessorCount = 108;
  p->integrated = 0; p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->pciBusID = d + 1; p->pciDeviceID = 0; p->pciDomainID = 0;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 40 << 20;
  p->persistingL2CacheMaxSize = 30 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = (cc >= 90 ? 228 : 164) * 1024;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->multiGpuBoardGroupID = d;
  p->concurrentManagedAccess = 1;
  p->computePreemptionSupported = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = (cc >= 90 ? 227 : 163) * 1024;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->memoryPoolsSupported = 1;
  p->ipcEventSupported = 1;
  return cudaSuccess;
}
EXPORT E cudaGetDeviceProperties_v2(cudaDeviceProp* p, int d) __attribute__((alias("cudaGetDeviceProperties")));
EXPORT E cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  ENTER();
  if (d < 0 || d >= devices()) FAIL(cudaErrorInvalidDevice);
  switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 48 * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (cc >= 90 ? 227 : 163) * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (cc >= 90 ? 228 : 164) * 1024; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *v = 1024; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMultiProcessorCount: *v = 108; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrComputeCapabilityMajor: *v = cc / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *v = cc % 10; break;
    case cudaDevAttrL2CacheSize: *v = 40 << 20; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    case cudaDevAttrClockRate: *v = 1410000; break;
    case cudaDevAttrMemoryClockRate: *v = 1215000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = 5120; break;
    case cudaDevAttrTotalConstantMemory: *v = 65536; break;
    case cudaDevAttrTextureAlignment: *v = 512; break;
    case cudaDevAttrMaxPitch: *v = 2147483647; break;
    case cudaDevAttrAsyncEngineCount: *v = 3; break;
    case cudaDevAttrPciBusId: *v = d + 1; break;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrComputePreemptionSupported: case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrGlobalL1CacheSupported: case cudaDevAttrLocalL1CacheSupported: *v = 1; break;
    default: *v = 0; TRACE("cudaDeviceGetAttribute %d: 0", (int)a);
  }
  return cudaSuccess;
}
EXPORT E cudaDeviceGetPCIBusId(char* id, int n, int d) { snprintf(id, n, "0000:%02X:00.0", d + 1); return cudaSuccess; }
EXPORT E cudaDeviceGetByPCIBusId(int* d, const char* id) { unsigned bus = 1; sscanf(id, "%*x:%x", &bus); *d = (int)bus - 1; return cudaSuccess; }
EXPORT E cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return cudaSuccess; }
EXPORT E cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 1024; return cudaSuccess; }
EXPORT E cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
EXPORT E cudaDeviceGetCacheConfig(cudaFuncCache* c) { *c = cudaFuncCachePreferNone; return cudaSuccess; }
EXPORT E cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
EXPORT E cudaDeviceCanAccessPeer(int* can, int d, int peer) {
  ENTER();
  if (d < 0 || d >= devices() || peer < 0 || peer >= devices()) FAIL(cudaErrorInvalidDevice);
  *can = d != peer;
  return cudaSuccess;
}
EXPORT E cudaDeviceEnablePeerAccess(int peer, unsigned) {
  ENTER();
  UNSAFE();
  Guard g(lock());
  if (!peers.insert({device, peer}).second) FAIL(cudaErrorPeerAccessAlreadyEnabled);
  return cudaSuccess;
}
EXPORT E cudaDeviceDisablePeerAccess(int peer) { Guard g(lock()); peers.erase({device, peer}); return cudaSuccess; }
EXPORT E cudaDeviceGetP2PAttribute(int* v, cudaDeviceP2PAttr, int, int) { *v = 1; return cudaSuccess; }
EXPORT E cudaDeviceSynchronize() {
  ENTER();
  UNSAFE();
  double until = 0;
  { Guard g(lock());
    for (void* p : live()) {
      Stream* s = (Stream*)p;
      if (*(unsigned*)p == 0x57ea && s->device == device) until = std::max(until, s->ready);
    }
    until = std::max(until, default_stream(device)->ready);
  }
  waited("cudaDeviceSynchronize", until);
  drain_device(device);
  return cudaSuccess;
}
EXPORT E cudaGetLastError() { E e = last_error; last_error = cudaSuccess; return e; }
EXPORT E cudaPeekAtLastError() { return last_error; }
static const std::map<int, std::pair<const char*, const char*>>& texts() {
  static auto* t = new std::map<int, std::pair<const char*, const char*>>{
      {0, {"cudaSuccess", "no error"}},
      {1, {"cudaErrorInvalidValue", "invalid argument"}},
      {2, {"cudaErrorMemoryAllocation", "out of memory"}},
      {3, {"cudaErrorInitializationError", "initialization error"}},
      {9, {"cudaErrorInvalidConfiguration", "invalid configuration argument"}},
      {46, {"cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"}},
      {52, {"cudaErrorMissingConfiguration", "__global__ function call is not configured"}},
      {98, {"cudaErrorInvalidDeviceFunction", "invalid device function"}},
      {100, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
      {101, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
      {400, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
      {600, {"cudaErrorNotReady", "device not ready"}},
      {704, {"cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"}},
      {801, {"cudaErrorNotSupported", "operation not supported"}},
      {900, {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
      {901, {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
      {904, {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
      {905, {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
      {906, {"cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"}},
      {907, {"cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"}},
      {908, {"cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"}}};
  return *t;
}
EXPORT const char* cudaGetErrorName(E e) { auto it = texts().find(e); return it == texts().end() ? "cudaErrorOther" : it->second.first; }
EXPORT const char* cudaGetErrorString(E e) { auto it = texts().find(e); return it == texts().end() ? "another error of the fake CUDA runtime" : it->second.second; }
EXPORT E cudaRuntimeGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
EXPORT E cudaDriverGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
EXPORT E cudaProfilerStart() { return cudaSuccess; }
EXPORT E cudaProfilerStop() { return cudaSuccess; }
static void* driver_symbol(const char* name) {
  static void* h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* p = h ? dlsym(h, name) : nullptr;
  if (!p && h) {
    auto make = (void* (*)(const char*))dlsym(h, "simulated_driver_stub");
    if (make) p = make(name);
  }
  return p;
}
EXPORT E cudaGetDriverEntryPoint(const char* name, void** p, unsigned long long flags, cudaDriverEntryPointQueryResult* r) {
  *p = driver_symbol(name);
  if (r) *r = *p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  TRACE("cudaGetDriverEntryPoint %s: %p", name, *p);
  return cudaSuccess;
}
EXPORT E cudaGetDriverEntryPointByVersion(const char* name, void** p, unsigned version, unsigned long long flags, cudaDriverEntryPointQueryResult* r) {
  return cudaGetDriverEntryPoint(name, p, flags, r);
}
EXPORT E cudaGetExportTable(const void** t, const cudaUUID_t*) { *t = nullptr; FAIL(cudaErrorNotSupported); }

// ---- memory ----------------------------------------------------------------------------------------------------------
EXPORT E cudaMalloc(void** p, size_t n) {
  ENTER();
  UNSAFE();
  contexts[device] = true;
  in_use();
  *p = n ? device_malloc(device, n) : nullptr;
  if (n && !*p) FAIL(cudaErrorMemoryAllocation);
  return cudaSuccess;
}
EXPORT E cudaFree(void* p) {
  drain_device(-1);
  ENTER();
  UNSAFE();
  if (!p) return cudaSuccess;
  Place at = place_of(p);
  if (at.kind == 2 && at.size == ARENA) {
    if (!device_free(at.device, p)) FAIL(cudaErrorInvalidValue);
    return cudaSuccess;
  }
  if (at.kind == 3) {
    std::unique_lock<std::shared_mutex> g(regions_lock());
    regions().erase(at.base);
    munmap(p, at.size);
    return cudaSuccess;
  }
  FAIL(cudaErrorInvalidValue);
}
static E host_region(void** p, size_t n, int kind, unsigned flags) {
  n = std::max<size_t>((n + 4095) & ~(size_t)4095, 4096);
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::unique_lock<std::shared_mutex> g(regions_lock());
  regions()[(uintptr_t)*p] = {n, kind, device, true, flags};
  return cudaSuccess;
}
EXPORT E cudaHostAlloc(void** p, size_t n, unsigned flags) { ENTER(); UNSAFE(); in_use(); CHECK(host_region(p, n, 1, flags)); return cudaSuccess; }
EXPORT E cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
EXPORT E cudaMallocManaged(void** p, size_t n, unsigned) { ENTER(); UNSAFE(); CHECK(host_region(p, n, 3, 0)); return cudaSuccess; }
EXPORT E cudaFreeHost(void* p) {
  drain_device(-1);
  ENTER();
  UNSAFE();
  if (!p) return cudaSuccess;
  std::unique_lock<std::shared_mutex> g(regions_lock());
  auto it = regions().find((uintptr_t)p);
  if (it == regions().end() || !it->second.ours) FAIL(cudaErrorInvalidValue);
  munmap(p, it->second.size);
  regions().erase(it);
  return cudaSuccess;
}
EXPORT E cudaHostRegister(void* p, size_t n, unsigned flags) {
  ENTER();
  UNSAFE();
  std::unique_lock<std::shared_mutex> g(regions_lock());
  regions()[(uintptr_t)p] = {n, 1, device, false, flags};
  return cudaSuccess;
}
EXPORT E cudaHostUnregister(void* p) {
  ENTER();
  std::unique_lock<std::shared_mutex> g(regions_lock());
  regions().erase((uintptr_t)p);
  return cudaSuccess;
}
EXPORT E cudaHostGetDevicePointer(void** d, void* h, unsigned) { *d = h; return cudaSuccess; }
EXPORT E cudaHostGetFlags(unsigned* f, void*) { *f = 0; return cudaSuccess; }
EXPORT E cudaMemGetInfo(size_t* free_, size_t* total) {
  ENTER();
  contexts[device] = true;
  Guard g(lock());
  *total = DEVICE_MEMORY;
  *free_ = DEVICE_MEMORY - arena(device).in_use - 512 * (1ull << 20);
  bases[device].store(arena(device).base);
  return cudaSuccess;
}
EXPORT E cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  ENTER();
  Place at = place_of(p);
  memset(a, 0, sizeof *a);
  a->type = at.kind == 0 ? cudaMemoryTypeUnregistered : at.kind == 1 ? cudaMemoryTypeHost : at.kind == 2 ? cudaMemoryTypeDevice : cudaMemoryTypeManaged;
  a->device = at.kind == 0 ? -1 : at.device;
  a->devicePointer = at.kind ? (void*)p : nullptr;
  a->hostPointer = at.kind == 2 ? nullptr : (void*)p;
  return cudaSuccess;
}
static size_t symbol_size(const void* s, void** p) {
  std::shared_lock<std::shared_mutex> g(funcs_lock());
  auto it = vars().find(s);
  if (it == vars().end()) return 0;
  *p = it->second.first;
  return it->second.second;
}
EXPORT E cudaGetSymbolAddress(void** p, const void* s) { if (!symbol_size(s, p)) FAIL(cudaErrorInvalidSymbol); return cudaSuccess; }
EXPORT E cudaGetSymbolSize(size_t* n, const void* s) { void* p; *n = symbol_size(s, &p); return cudaSuccess; }

static const char* place_name(const Place& p) { static const char* n[] = {"pageable", "pinned", "device", "managed"}; return n[p.kind]; }
static E copy(const char* fn, const char* what, void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream, bool async, std::function<void()> run) {
  Stream* s = stream_of(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (async && stream && s->device != device) {}  // allowed for copies
  Place to = place_of(dst), from = place_of(src);
  bool bad = (kind == cudaMemcpyHostToDevice && (to.kind < 2 || from.kind == 2)) || (kind == cudaMemcpyDeviceToHost && (from.kind < 2 || to.kind == 2)) ||
             (kind == cudaMemcpyDeviceToDevice && (from.kind == 0 || to.kind == 0)) || (kind == cudaMemcpyHostToHost && (from.kind == 2 || to.kind == 2));
  if (bad && bytes) return cudaErrorInvalidValue;
  contexts[device] = true;
  std::string name = std::string(what) + " " + (from.kind < 2 ? "host" : "device") + " to " + (to.kind < 2 ? "host" : "device");
  if (from.kind == 2 && to.kind == 2) name = std::string(what) + (from.device == to.device ? " on one device" : " between devices");
  else name += std::string(", ") + place_name(from.kind < 2 ? from : to);
  name += async ? ", async" : ", sync";
  if (s->capture && (from.kind == 0 || to.kind == 0)) { invalidate(*s->capture); return cudaErrorStreamCaptureUnsupported; }
  simulated_count(("copies/" + name + (s->capture ? ", captured" : "")).c_str(), 1);
  simulated_count(("bytes/" + name).c_str(), (long long)bytes);
  note("copy " + name + " of " + std::to_string(bytes));
  TRACE("copy %s of %zu on %p", name.c_str(), bytes, (void*)stream);
  if (lazy && !s->capture && from.kind == 0 && bytes && strncmp(what, "copy of rows", 12)) {  // pageable memory is read now
    auto held = std::make_shared<std::vector<char>>((const char*)src, (const char*)src + bytes);
    run = [held, dst, bytes] { memmove(dst, held->data(), bytes); };
  }
  E e = enqueue(fn, s, "copy", name, copy_us, std::move(run));
  if (e) return e;
  if (lazy && !s->capture && (!async || to.kind == 0 || (from.kind == 0 && !strncmp(what, "copy of rows", 12)))) drain(s);
  if (!async && !(from.kind == 2 && to.kind == 2)) waited("cudaMemcpy", s->ready);
  if (async && !s->capture && from.kind == 2 && to.kind == 0) waited("cudaMemcpyAsync to pageable memory", s->ready);
  return cudaSuccess;
}
#define PLAIN [=] { if (n) memmove(d, s, n); }
EXPORT E cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st) { ENTER(); CHECK(copy(__func__, "copy", d, s, n, k, st, true, PLAIN)); return cudaSuccess; }
EXPORT E cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) { ENTER(); UNSAFE(); CHECK(copy(__func__, "copy", d, s, n, k, nullptr, false, PLAIN)); return cudaSuccess; }
EXPORT E cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) { ENTER(); CHECK(copy(__func__, "copy", d, s, n, cudaMemcpyDefault, st, true, PLAIN)); return cudaSuccess; }
EXPORT E cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) { ENTER(); UNSAFE(); CHECK(copy(__func__, "copy", d, s, n, cudaMemcpyDefault, nullptr, false, PLAIN)); return cudaSuccess; }
#define ROWS [=] { for (size_t i = 0; i < h; ++i) memmove((char*)d + i * dp, (const char*)s + i * sp, w); }
EXPORT E cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k, cudaStream_t st) { ENTER(); CHECK(copy(__func__, "copy of rows", d, s, w * h, k, st, true, ROWS)); return cudaSuccess; }
EXPORT E cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k) { ENTER(); UNSAFE(); CHECK(copy(__func__, "copy of rows", d, s, w * h, k, nullptr, false, ROWS)); return cudaSuccess; }
EXPORT E cudaMemcpyToSymbolAsync(const void* sym, const void* s, size_t n, size_t off, cudaMemcpyKind k, cudaStream_t st) {
  ENTER();
  void* p = nullptr;
  if (symbol_size(sym, &p) < n + off) FAIL(cudaErrorInvalidSymbol);
  memcpy((char*)p + off, s, n);
  simulated_count("copies/to symbol", 1);
  return cudaSuccess;
}
EXPORT E cudaMemcpyToSymbol(const void* sym, const void* s, size_t n, size_t off, cudaMemcpyKind k) { return cudaMemcpyToSymbolAsync(sym, s, n, off, k, nullptr); }
EXPORT E cudaMemcpyFromSymbolAsync(void* d, const void* sym, size_t n, size_t off, cudaMemcpyKind k, cudaStream_t st) {
  ENTER();
  void* p = nullptr;
  if (symbol_size(sym, &p) < n + off) FAIL(cudaErrorInvalidSymbol);
  memcpy(d, (char*)p + off, n);
  simulated_count("copies/from symbol", 1);
  return cudaSuccess;
}
EXPORT E cudaMemcpyFromSymbol(void* d, const void* sym, size_t n, size_t off, cudaMemcpyKind k) { return cudaMemcpyFromSymbolAsync(d, sym, n, off, k, nullptr); }
static E set(const char* fn, void* p, int v, size_t n, cudaStream_t stream) {
  Stream* s = stream_of(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (n && place_of(p).kind == 0) return cudaErrorInvalidValue;
  contexts[device] = true;
  simulated_count(s->capture ? "memsets/captured" : "memsets/memset", 1);
  note("memset of " + std::to_string(n));
  return enqueue(fn, s, "memset", "memset", kernel_us, [=] { if (n) memset(p, v, n); });
}
EXPORT E cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) { ENTER(); CHECK(set(__func__, p, v, n, s)); return cudaSuccess; }
EXPORT E cudaMemset(void* p, int v, size_t n) { ENTER(); UNSAFE(); CHECK(set(__func__, p, v, n, nullptr)); return cudaSuccess; }
EXPORT E cudaMemset2DAsync(void* p, size_t pitch, int v, size_t w, size_t h, cudaStream_t s) {
  ENTER();
  for (size_t i = 0; i < h; ++i) CHECK(set(__func__, (char*)p + i * pitch, v, w, s));
  return cudaSuccess;
}
EXPORT E cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }
EXPORT E cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) { return cudaSuccess; }

// ---- pools: stream-ordered allocation --------------------------------------------------------------------------------
struct Pool { int device; };
static Pool* pool_of(int d) { static auto* all = new Pool*[64](); Guard g(lock()); if (!all[d]) all[d] = new Pool{d}; return all[d]; }
EXPORT E cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int d) { *p = (cudaMemPool_t)pool_of(d); return cudaSuccess; }
EXPORT E cudaDeviceGetMemPool(cudaMemPool_t* p, int d) { *p = (cudaMemPool_t)pool_of(d); return cudaSuccess; }
EXPORT E cudaDeviceSetMemPool(int, cudaMemPool_t) { return cudaSuccess; }
EXPORT E cudaMemPoolCreate(cudaMemPool_t* p, const cudaMemPoolProps* props) { *p = (cudaMemPool_t) new Pool{props->location.id}; return cudaSuccess; }
EXPORT E cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
EXPORT E cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORT E cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) { *(unsigned long long*)v = 0; return cudaSuccess; }
EXPORT E cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORT E cudaMemPoolGetAccess(cudaMemAccessFlags* f, cudaMemPool_t, cudaMemLocation*) { *f = cudaMemAccessFlagsProtReadWrite; return cudaSuccess; }
EXPORT E cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
EXPORT E cudaMallocAsync(void** p, size_t n, cudaStream_t) {
  ENTER();
  *p = device_malloc(device, n);
  if (!*p) FAIL(cudaErrorMemoryAllocation);
  return cudaSuccess;
}
EXPORT E cudaMallocFromPoolAsync(void** p, size_t n, cudaMemPool_t pool, cudaStream_t) {
  ENTER();
  *p = device_malloc(((Pool*)pool)->device, n);
  if (!*p) FAIL(cudaErrorMemoryAllocation);
  return cudaSuccess;
}
EXPORT E cudaFreeAsync(void* p, cudaStream_t) { ENTER(); Place at = place_of(p); if (p) device_free(at.device, p); return cudaSuccess; }

// ---- between processes -----------------------------------------------------------------------------------------------
struct Handle { int pid, fd, device; size_t offset, size; };
EXPORT E cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) {
  ENTER();
  Place at = place_of(p);
  if (at.kind != 2) FAIL(cudaErrorInvalidValue);
  Guard g(lock());
  Arena& a = arena(at.device);
  size_t off = (size_t)((char*)p - a.base);
  auto it = a.used_.upper_bound(off);
  --it;
  Handle x{getpid(), a.fd, at.device, it->first, it->second};
  memset(h, 0, sizeof *h);
  memcpy(h, &x, sizeof x);
  return cudaSuccess;
}
EXPORT E cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned) {
  ENTER();
  Handle x;
  memcpy(&x, &h, sizeof x);
  char path[80];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", x.pid, x.fd);
  int fd = open(path, O_RDWR);
  if (fd < 0) FAIL(cudaErrorInvalidValue);
  size_t from = x.offset & ~(size_t)4095, n = (x.offset + x.size - from + 4095) & ~(size_t)4095;
  char* at = (char*)mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)from);
  close(fd);
  if (at == MAP_FAILED) FAIL(cudaErrorMapBufferObjectFailed);
  std::unique_lock<std::shared_mutex> g(regions_lock());
  regions()[(uintptr_t)at] = {n, 2, device, false, 0};
  *p = at + (x.offset - from);
  return cudaSuccess;
}
EXPORT E cudaIpcCloseMemHandle(void* p) {
  ENTER();
  Place at = place_of(p);
  std::unique_lock<std::shared_mutex> g(regions_lock());
  regions().erase(at.base);
  munmap((void*)at.base, at.size);
  return cudaSuccess;
}
EXPORT E cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t) { ENTER(); memset(h, 1, sizeof *h); return cudaSuccess; }
EXPORT E cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags);
EXPORT E cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t) { return cudaEventCreateWithFlags(e, cudaEventDisableTiming); }

// ---- streams ---------------------------------------------------------------------------------------------------------
EXPORT E cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
  ENTER();
  UNSAFE();
  contexts[device] = true;
  in_use();
  Stream* p = new Stream;
  p->device = device; p->flags = flags; p->priority = priority; p->id = ids++;
  Guard g(lock());
  live().insert(p);
  *s = (cudaStream_t)p;
  return cudaSuccess;
}
EXPORT E cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
EXPORT E cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
#define STREAM(p, s) Stream* p = stream_of(s); if (!p) FAIL(cudaErrorInvalidResourceHandle)
EXPORT E cudaStreamDestroy(cudaStream_t s) { ENTER(); STREAM(p, s); Guard g(lock()); live().erase(p); return cudaSuccess; }
EXPORT E cudaStreamGetPriority(cudaStream_t s, int* v) { STREAM(p, s); *v = p->priority; return cudaSuccess; }
EXPORT E cudaStreamGetFlags(cudaStream_t s, unsigned* v) { STREAM(p, s); *v = p->flags; return cudaSuccess; }
EXPORT E cudaStreamGetDevice(cudaStream_t s, int* v) { STREAM(p, s); *v = p->device; return cudaSuccess; }
EXPORT E cudaStreamGetId(cudaStream_t s, unsigned long long* v) { STREAM(p, s); *v = p->id; return cudaSuccess; }
EXPORT E cudaStreamAttachMemAsync(cudaStream_t, void*, size_t, unsigned) { return cudaSuccess; }
EXPORT E cudaStreamSetAttribute(cudaStream_t, cudaLaunchAttributeID, const cudaLaunchAttributeValue*) { return cudaSuccess; }
EXPORT E cudaStreamGetAttribute(cudaStream_t, cudaLaunchAttributeID, cudaLaunchAttributeValue* v) { memset(v, 0, sizeof *v); return cudaSuccess; }
EXPORT E cudaCtxResetPersistingL2Cache() { return cudaSuccess; }
EXPORT E cudaStreamQuery(cudaStream_t s) {
  ENTER();
  STREAM(p, s);
  Guard g(lock());
  if (p->capture) { invalidate(*p->capture); FAIL(cudaErrorStreamCaptureUnsupported); }
  drain(p);
  return now() >= p->ready ? cudaSuccess : cudaErrorNotReady;
}
EXPORT E cudaStreamSynchronize(cudaStream_t s) {
  ENTER();
  STREAM(p, s);
  { Guard g(lock());
    if (p->capture) { invalidate(*p->capture); FAIL(cudaErrorStreamCaptureUnsupported); } }
  UNSAFE();
  waited("cudaStreamSynchronize", p->ready);
  drain(p);
  return cudaSuccess;
}
EXPORT E cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {
  ENTER();
  STREAM(p, s);
  note("host function");
  CHECK(enqueue(__func__, p, "host function", "host function", 0, [=] { fn(data); }));
  return cudaSuccess;
}
EXPORT E cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t fn, void* data, unsigned) {
  ENTER();
  STREAM(p, s);
  CHECK(enqueue(__func__, p, "host function", "callback", 0, [=] { fn(s, cudaSuccess, data); }));
  return cudaSuccess;
}

// ---- events ----------------------------------------------------------------------------------------------------------
EXPORT E cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  ENTER();
  contexts[device] = true;
  Event* p = new Event;
  p->device = device; p->flags = flags;
  Guard g(lock());
  live().insert(p);
  *e = (cudaEvent_t)p;
  return cudaSuccess;
}
EXPORT E cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
static Event* event_of(cudaEvent_t e) { Guard g(lock()); return e && live().count((void*)e) && ((Event*)e)->magic == 0xe4e7 ? (Event*)e : nullptr; }
#define EVENT(p, e) Event* p = event_of(e); if (!p) FAIL(cudaErrorInvalidResourceHandle)
EXPORT E cudaEventDestroy(cudaEvent_t e) { ENTER(); EVENT(p, e); Guard g(lock()); live().erase(p); delete p; return cudaSuccess; }
EXPORT E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  ENTER();
  EVENT(p, e);
  STREAM(q, s);
  if (p->device != q->device) FAIL(cudaErrorInvalidResourceHandle);
  note("event record");
  Guard g(lock());
  if (q->capture) {
    if (q->capture->status != cudaStreamCaptureStatusActive) FAIL(cudaErrorStreamCaptureInvalidated);
    p->capture = q->capture;
    p->clock = q->capture->clock[q];
  } else {
    p->capture = nullptr;
    p->time = std::max(now(), q->ready);
    p->stream = q;
    p->upto = q->queued;
  }
  p->recorded = true;
  return cudaSuccess;
}
EXPORT E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
EXPORT E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  ENTER();
  EVENT(p, e);
  STREAM(q, s);
  note("stream waits for event");
  Guard g(lock());
  if (p->capture && p->capture->status == cudaStreamCaptureStatusNone) p->capture = nullptr;  // its capture has ended: nothing to wait for
  if (p->capture) {
    if (q->capture && q->capture != p->capture) { invalidate(*q->capture); invalidate(*p->capture); FAIL(cudaErrorStreamCaptureMerge); }
    q->capture = p->capture;
    auto& clock = q->capture->clock[q];
    for (auto& [t, n] : p->clock) clock[t] = std::max(clock[t], n);
  } else if (q->capture) {
    if (p->recorded) { invalidate(*q->capture); FAIL(cudaErrorStreamCaptureIsolation); }
  } else {
    if (p->time > q->ready) q->ready = p->time;
    if (lazy && p->recorded && p->stream && p->stream != q) { q->items.push_back({nullptr, p->stream, p->upto}); ++q->queued; }
  }
  return cudaSuccess;
}
EXPORT E cudaEventQuery(cudaEvent_t e) {
  ENTER();
  EVENT(p, e);
  { Guard g(lock());
    if (p->capture && p->capture->status == cudaStreamCaptureStatusActive) { invalidate(*p->capture); FAIL(cudaErrorCapturedEvent); } }
  UNSAFE();
  if (lazy && p->recorded && p->stream) {
    bool pending;
    { Guard g(lock()); pending = p->stream->done < p->upto; }
    if (pending && now() - p->time < lazy_age) return cudaErrorNotReady;
    if (pending) drain(p->stream, p->upto);
  }
  return !p->recorded || now() >= p->time ? cudaSuccess : cudaErrorNotReady;
}
EXPORT E cudaEventSynchronize(cudaEvent_t e) {
  ENTER();
  EVENT(p, e);
  { Guard g(lock());
    if (p->capture && p->capture->status == cudaStreamCaptureStatusActive) { invalidate(*p->capture); FAIL(cudaErrorCapturedEvent); } }
  UNSAFE();
  waited("cudaEventSynchronize", p->time);
  if (p->recorded) drain(p->stream, p->upto);
  return cudaSuccess;
}
EXPORT E cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  ENTER();
  EVENT(p, a);
  EVENT(q, b);
  if ((p->flags | q->flags) & cudaEventDisableTiming || !p->recorded || !q->recorded || p->device != q->device) FAIL(cudaErrorInvalidResourceHandle);
  if (now() < q->time) return cudaErrorNotReady;
  *ms = (float)((q->time - p->time) * 1e-3);
  return cudaSuccess;
}
EXPORT E cudaEventElapsedTime_v2(float* ms, cudaEvent_t a, cudaEvent_t b) { return cudaEventElapsedTime(ms, a, b); }

// ---- capture ---------------------------------------------------------------------------------------------------------
EXPORT E cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) { std::swap(*m, thread_mode); return cudaSuccess; }
EXPORT E cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  ENTER();
  STREAM(p, s);
  if (!s || s == cudaStreamLegacy) FAIL(cudaErrorStreamCaptureUnsupported);
  Guard g(lock());
  if (p->capture) FAIL(cudaErrorIllegalState);
  auto c = std::make_shared<Capture>();
  c->id = ids++; c->mode = mode; c->origin = p; c->owner = pthread_self();
  c->clock[p];
  p->capture = c;
  active().push_back(c);
  ++captures;
  note("begin of capture");
  return cudaSuccess;
}
EXPORT E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* out) {
  ENTER();
  STREAM(p, s);
  note("end of capture");
  Guard g(lock());
  auto c = p->capture;
  if (out) *out = nullptr;
  if (!c) FAIL(cudaErrorIllegalState);
  if (c->origin != p) { invalidate(*c); FAIL(cudaErrorStreamCaptureUnmatched); }
  if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->owner, pthread_self())) FAIL(cudaErrorStreamCaptureWrongThread);
  bool unjoined = false;
  for (auto& [t, n] : c->ops) if (c->clock[p][t] < n) unjoined = true;
  auto status = c->status;
  c->status = cudaStreamCaptureStatusNone;
  for (auto& [t, clock] : c->clock) t->capture = nullptr;
  for (size_t i = 0; i < active().size(); ++i) if (active()[i] == c) { active().erase(active().begin() + i); break; }
  --captures;
  if (status != cudaStreamCaptureStatusActive) FAIL(cudaErrorStreamCaptureInvalidated);
  if (unjoined) FAIL(cudaErrorStreamCaptureUnjoined);
  *out = (cudaGraph_t)c->graph;
  return cudaSuccess;
}
EXPORT E cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* v) {
  STREAM(p, s);
  *v = cudaStreamCaptureStatusNone;
  if (!captures.load()) return cudaSuccess;
  Guard g(lock());
  if (p->capture) *v = p->capture->status;
  else if (!s || s == cudaStreamLegacy)
    for (auto& c : active()) if (c->origin->device == p->device && !(c->origin->flags & cudaStreamNonBlocking)) FAIL(cudaErrorStreamCaptureImplicit);
  return cudaSuccess;
}
static E info(cudaStream_t s, cudaStreamCaptureStatus* v, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** deps, size_t* n) {
  STREAM(p, s);
  Guard g(lock());
  *v = p->capture ? p->capture->status : cudaStreamCaptureStatusNone;
  if (id) *id = p->capture ? p->capture->id : 0;
  if (graph) *graph = p->capture ? (cudaGraph_t)p->capture->graph : nullptr;
  if (deps) *deps = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
#undef cudaStreamGetCaptureInfo_v2
#undef cudaStreamUpdateCaptureDependencies
EXPORT E cudaStreamGetCaptureInfo_v2(cudaStream_t s, cudaStreamCaptureStatus* v, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** d, size_t* n) { return info(s, v, id, g, d, n); }
EXPORT E cudaStreamGetCaptureInfo_v3(cudaStream_t s, cudaStreamCaptureStatus* v, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e, size_t* n) {
  if (e) *e = nullptr;
  return info(s, v, id, g, d, n);
}
#if CUDART_VERSION >= 13000
EXPORT E cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* v, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e, size_t* n) {
  return cudaStreamGetCaptureInfo_v3(s, v, id, g, d, e, n);
}
EXPORT E cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { return cudaSuccess; }
#endif
EXPORT E cudaGraphCreate(cudaGraph_t* g, unsigned) { ENTER(); *g = (cudaGraph_t) new Graph; return cudaSuccess; }
EXPORT E cudaGraphDestroy(cudaGraph_t g) { ENTER(); delete (Graph*)g; return cudaSuccess; }
EXPORT E cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) {
  ENTER();
  UNSAFE();
  *x = (cudaGraphExec_t) new Exec{((Graph*)g)->nodes};
  simulated_count("graphs/nodes instantiated", (long long)((Graph*)g)->nodes.size());
  return cudaSuccess;
}
EXPORT E cudaGraphInstantiate(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiateWithFlags(x, g, f); }
EXPORT E cudaGraphInstantiateWithParams(cudaGraphExec_t* x, cudaGraph_t g, cudaGraphInstantiateParams*) { return cudaGraphInstantiateWithFlags(x, g, 0); }
EXPORT E cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
EXPORT E cudaGraphExecDestroy(cudaGraphExec_t x) { ENTER(); delete (Exec*)x; return cudaSuccess; }
EXPORT E cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
  ENTER();
  STREAM(p, s);
  note("graph launch");
  for (auto& n : ((Exec*)x)->nodes) {
    simulated_count(("replayed/" + n.kind).c_str(), 1);
    Node node = n;
    CHECK(enqueue(__func__, p, node.kind.c_str(), node.name, node.us, node.run));
  }
  return cudaSuccess;
}
EXPORT E cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* n) {
  auto& all = ((Graph*)g)->nodes;
  if (nodes) for (size_t i = 0; i < std::min(*n, all.size()); ++i) nodes[i] = (cudaGraphNode_t)&all[i];
  *n = all.size();
  return cudaSuccess;
}
EXPORT E cudaGraphGetRootNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* n) { *n = ((Graph*)g)->nodes.empty() ? 0 : 1; return cudaSuccess; }
EXPORT E cudaGraphNodeGetType(cudaGraphNode_t n, cudaGraphNodeType* t) {
  const std::string& k = ((Node*)n)->kind;
  *t = k == "kernel" || k == "collective" ? cudaGraphNodeTypeKernel : k == "copy" ? cudaGraphNodeTypeMemcpy : k == "memset" ? cudaGraphNodeTypeMemset : cudaGraphNodeTypeHost;
  return cudaSuccess;
}
EXPORT E cudaGraphAddEmptyNode(cudaGraphNode_t* n, cudaGraph_t, const cudaGraphNode_t*, size_t) { static Node empty; *n = (cudaGraphNode_t)&empty; return cudaSuccess; }
EXPORT E cudaGraphDebugDotPrint(cudaGraph_t g, const char* path, unsigned) {
  if (FILE* f = fopen(path, "w")) {
    fprintf(f, "digraph dot {\n");
    int i = 0;
    for (auto& n : ((Graph*)g)->nodes) fprintf(f, "n%d [label=\"%s %s\"];\n", i++, n.kind.c_str(), demangled(n.name).c_str());
    fprintf(f, "}\n");
    fclose(f);
  }
  return cudaSuccess;
}
EXPORT E cudaUserObjectCreate(cudaUserObject_t* o, void*, cudaHostFn_t, unsigned, unsigned) { *o = (cudaUserObject_t)malloc(8); return cudaSuccess; }
EXPORT E cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
EXPORT E cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* v) { *(unsigned long long*)v = 0; return cudaSuccess; }
EXPORT E cudaDeviceGraphMemTrim(int) { return cudaSuccess; }

// ---- reports ---------------------------------------------------------------------------------------------------------
static void json(std::string& out, const std::string& s) {
  out += '"';
  for (char c : s) { if (c == '"' || c == '\\') out += '\\'; if ((unsigned char)c >= 32) out += c; }
  out += '"';
}
EXPORT void simulated_reset() {
  for (simulated_counter* c = counters.load(); c; c = c->next) c->n = 0;
  { std::lock_guard<std::mutex> g(named_lock()); named().clear(); }
  std::shared_lock<std::shared_mutex> g(funcs_lock());
  for (auto& [p, f] : funcs()) f->n = f->captured = 0;
  total_launches = 0;
  Guard h(lock());
  for (void* p : live()) if (*(unsigned*)p == 0x57ea) ((Stream*)p)->launches = 0;
  for (int d = 0; d < devices(); ++d) default_stream(d)->launches = 0;
}
EXPORT long long simulated_launches() { return total_launches; }
// {"launches": {...}, "waits": {...}, ...}. The text stays valid until the next call.
EXPORT const char* simulated_report() {
  std::map<std::string, std::map<std::string, long long>> all;
  auto add = [&](const std::string& name, long long n) {
    if (!n) return;
    size_t at = name.find('/');
    all[name.substr(0, at)][name.substr(at + 1)] += n;
  };
  for (simulated_counter* c = counters.load(); c; c = c->next) add(c->name, c->n);
  { std::lock_guard<std::mutex> g(named_lock()); for (auto& [k, n] : named()) add(k, n); }
  { std::shared_lock<std::shared_mutex> g(funcs_lock());
    for (auto& [p, f] : funcs()) {
      if (f->n) add("launches/" + demangled(f->mangled), f->n);
      if (f->captured) add("captured launches/" + demangled(f->mangled), f->captured);
    } }
  { Guard g(lock());
    auto one = [&](Stream* s, const char* kind) { if (s->launches) all["streams"]["device " + std::to_string(s->device) + kind + std::to_string(s->id)] = s->launches; };
    for (void* p : live()) if (*(unsigned*)p == 0x57ea) one((Stream*)p, ", stream ");
    for (int d = 0; d < devices(); ++d) {
      one(default_stream(d), ", default stream ");
      if (contexts[d]) all["contexts"]["device " + std::to_string(d)] = 1;
    } }
  static thread_local std::string* out;
  if (!out) out = new std::string;
  *out = "{";
  bool first = true;
  for (auto& [section, entries] : all) {
    if (!first) *out += ", ";
    first = false;
    json(*out, section);
    *out += ": {";
    bool f = true;
    for (auto& [k, n] : entries) { if (!f) *out += ", "; f = false; json(*out, k); *out += ": " + std::to_string(n); }
    *out += "}";
  }
  *out += "}";
  return out->c_str();
}
EXPORT void simulated_log_start() { std::lock_guard<std::mutex> g(log_lock()); delete the_log; the_log = new std::vector<std::string>; }
EXPORT const char* simulated_log() {
  static std::string* out;
  std::lock_guard<std::mutex> g(log_lock());
  delete out;
  out = new std::string("[");
  if (the_log) for (size_t i = 0; i < the_log->size(); ++i) { if (i) *out += ", "; json(*out, (*the_log)[i]); }
  *out += "]";
  delete the_log;
  the_log = nullptr;
  return out->c_str();
}
// A symbol that the rig does not have.
EXPORT int simulated_missing(const char* name) {
  simulated_count((std::string("missing/") + name).c_str(), 1);
  simulated_tracef("MISSING: %s is not in the fake CUDA runtime", name);
  if (stacks) print_python_stack(name);
  last_error = cudaErrorNotSupported;
  return cudaErrorNotSupported;
}
