// Counters, the log, traces, and the reports of all of them for Python.

#include <cxxabi.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "launches.h"
#include "runtime.h"

namespace simulated {

static const bool prints_calls = simulated_setting("SIMULATED_TRACE", 0) != 0;
static const bool prints_stacks = simulated_setting("SIMULATED_STACK", 0) != 0;

struct Counters {
  std::mutex mutex;
  std::map<std::string, std::atomic<long long>> all;
  std::unique_ptr<std::vector<std::string>> log;
  std::atomic<bool> is_logging{false};
};

static Counters& counters() {
  static auto* made = new Counters;
  return *made;
}

std::atomic<long long>* counter(const std::string& name) {
  std::lock_guard guard(counters().mutex);
  return &counters().all[name];
}

void count(const std::string& name, long long by) { *counter(name) += by; }

bool is_tracing() { return prints_calls; }
bool is_logging() { return counters().is_logging; }

void note(const std::string& what) {
  if (!is_logging()) return;
  std::lock_guard guard(counters().mutex);
  if (counters().log) counters().log->push_back(what);
}

std::string demangled(const std::string& name) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), free);
  return status == 0 && text ? text.get() : name;
}

static std::string thread_name() {
  char name[20] = "";
  prctl(PR_GET_NAME, name);
  return name;
}

static void print_line(const char* format, va_list arguments) {
  char text[2000];
  int size = snprintf(text, sizeof text, "[simulated %d %s] ", getpid(), thread_name().c_str());
  size += vsnprintf(text + size, sizeof text - size - 1, format, arguments);
  size = std::min<int>(size, sizeof text - 2);
  text[size++] = '\n';
  (void)!write(STDERR_FILENO, text, size);  // at once, so that lines of processes do not mix
}

void print_python_stack(const std::string& why) {
  if (!prints_stacks) return;
  simulated_print("%s", why.c_str());
  static auto dump = (void (*)(int, void*))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  static auto state = (void* (*)())dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  if (dump && state && state()) dump(STDERR_FILENO, state());
}

// -- time --------------------------------------------------------------------------------------

double kernel_time = simulated_setting("SIMULATED_KERNEL_US", 0);
double copy_time = simulated_setting("SIMULATED_COPY_US", 0);
double launch_time = simulated_setting("SIMULATED_LAUNCH_US", 0);

static double microseconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

double now() { return microseconds(CLOCK_MONOTONIC); }
double computed() { return microseconds(CLOCK_THREAD_CPUTIME_ID); }

void host_waits(const char* function, double until) {
  count(std::string("waits/") + function + " in " + thread_name());
  note(std::string("wait ") + function);
  print_python_stack(std::string("the host waits: ") + function);
  double rest = until - now();
  if (rest > 0) usleep((useconds_t)rest);
}

// -- reports -----------------------------------------------------------------------------------

using Report = std::map<std::string, std::map<std::string, long long>>;

static Report report() {
  Report made;
  auto add = [&](const std::string& name, long long number) {
    auto at = name.find('/');
    if (number) made[name.substr(0, at)][name.substr(at + 1)] += number;
  };
  {
    std::lock_guard guard(counters().mutex);
    for (auto& [name, number] : counters().all) add(name, number);
  }
  each_kernel([&](Kernel& kernel) {
    add("launches/" + demangled(kernel.name), kernel.launches);
    add("captured launches/" + demangled(kernel.name), kernel.captured);
  });
  for (int device = 0; device < device_count(); ++device) {
    auto name = "device " + std::to_string(device);
    add("contexts/" + name, simulated_has_context(device));
    for (auto* stream : streams_of(device))
      add("streams/" + name + ", stream " + std::to_string(stream->id), stream->launches);
  }
  return made;
}

static std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') made += '\\';
    made += c;
  }
  return made + '"';
}

/// Keeps a text for as long as the thread does not ask for another one.
static const char* kept(std::string text) {
  static thread_local auto* last = new std::string;
  *last = std::move(text);
  return last->c_str();
}

}  // namespace simulated

using namespace simulated;

API void simulated_count(const char* name, long long by) { count(name, by); }

API void simulated_print(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print_line(format, arguments);
  va_end(arguments);
}

API void simulated_trace(const char* format, ...) {
  if (!prints_calls) return;
  va_list arguments;
  va_start(arguments, format);
  print_line(format, arguments);
  va_end(arguments);
}

API int simulated_missing(const char* name) {
  count(std::string("missing/") + name);
  simulated_print("%s is not simulated", name);
  print_python_stack(std::string(name) + " is not simulated");
  return failed(name, cudaErrorNotSupported);
}

API void simulated_set_times(double kernel, double copy, double launch) {
  kernel_time = kernel, copy_time = copy, launch_time = launch;
}

API void simulated_reset() {
  {
    std::lock_guard guard(counters().mutex);
    for (auto& [_, number] : counters().all) number = 0;
  }
  each_kernel([](Kernel& kernel) { kernel.launches = kernel.captured = 0; });
  for (int device = 0; device < device_count(); ++device)
    for (auto* stream : streams_of(device)) stream->launches = 0;
}

/// Returns JSON: {"launches": {...}, "waits": {...}, ...}.
API const char* simulated_report() {
  std::string text;
  for (auto& [section, entries] : report()) {
    std::string inner;
    for (auto& [name, number] : entries)
      inner += (inner.empty() ? "" : ", ") + quoted(name) + ": " + std::to_string(number);
    text += (text.empty() ? "" : ", ") + quoted(section) + ": {" + inner + "}";
  }
  return kept("{" + text + "}");
}

API void simulated_log_start() {
  std::lock_guard guard(counters().mutex);
  counters().log = std::make_unique<std::vector<std::string>>();
  counters().is_logging = true;
}

API const char* simulated_log() {
  std::lock_guard guard(counters().mutex);
  std::string text;
  if (counters().log)
    for (auto& entry : *counters().log) text += (text.empty() ? "" : ", ") + quoted(entry);
  counters().is_logging = false;
  counters().log.reset();
  return kept("[" + text + "]");
}
