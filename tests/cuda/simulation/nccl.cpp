// A NCCL between processes of one machine, or between the devices of one process.
//
// Data moves in the order of the streams. Each rank publishes what it sends, as a file in a folder
// in memory, and reads what the others have published. What is published says what was called, so
// ranks whose calls do not match are found.

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "simulation.h"

#define API extern "C" __attribute__((visibility("default")))

extern "C" int cudaMalloc(void**, size_t);
extern "C" int cudaFree(void*);

enum Result {
  SUCCESS = 0,
  UNHANDLED_CUDA = 1,
  SYSTEM_ERROR = 2,
  INVALID_USAGE = 5,
  REMOTE_ERROR = 6,
};

/// The version of NCCL whose interface this is: torch 2.14's.
static const int VERSION = 23007;

/// Without, collectives move nothing and wait for nobody, so that the time of one rank's host shows.
static const bool MOVES = simulated_setting("SIMULATED_NCCL_MOVES", 1) != 0;

static const double TIMEOUT = simulated_setting("SIMULATED_NCCL_TIMEOUT", 60);  // seconds

static thread_local std::string last_error;

struct Communicator {
  std::string name;  // of all its ranks
  int rank, size, device;
  bool is_local;  // all ranks are in this process
  int64_t calls = 0, splits = 0;
  std::map<int, int64_t> sent = {}, received = {};  // by peer
  bool was_called = false;  // calls run in their order, whatever their streams
  void* last_stream = nullptr;
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{SUCCESS};
};

/// What a rank says of a call beside its data.
struct Head {
  int kind, dtype, operation, root;
  int64_t count;

  bool operator==(const Head&) const = default;
};

struct Message {
  Head head;
  std::vector<char> data;
};

// -- messages ----------------------------------------------------------------------------------

static double seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

/// Between the devices of this process.
struct Local {
  std::mutex mutex;
  std::map<std::string, Message> messages;
};

static Local& local() {
  static auto* made = new Local;
  return *made;
}

static std::string key(const Communicator& c, const std::string& what, int64_t number, int rank) {
  return c.name + "." + what + std::to_string(number) + "." + std::to_string(rank);
}

static std::string path(const std::string& key) {
  const char* folder = getenv("SIMULATED_NCCL_FOLDER");
  return std::string(folder ? folder : "/dev/shm") + "/simulated-nccl-" + key;
}

static void put(const Communicator& c, const std::string& key, const Head& head, const void* data,
                size_t size) {
  if (c.is_local) {
    std::lock_guard guard(local().mutex);
    local().messages[key] = {head, {(const char*)data, (const char*)data + size}};
    return;
  }
  auto unfinished = path(key) + ".new";
  FILE* file = fopen(unfinished.c_str(), "wb");
  bool is_written = file && fwrite(&head, sizeof head, 1, file) == 1;
  is_written = is_written && (!size || fwrite(data, size, 1, file) == 1);
  if (file) is_written = fclose(file) == 0 && is_written;
  if (!is_written) simulated_print("NCCL: cannot write %s: %s", unfinished.c_str(), strerror(errno));
  rename(unfinished.c_str(), path(key).c_str());
}

static bool take_if_there(const Communicator& c, const std::string& key, Message& message) {
  if (c.is_local) {
    std::lock_guard guard(local().mutex);
    auto found = local().messages.find(key);
    if (found == local().messages.end()) return false;
    message = found->second;
    return true;
  }
  FILE* file = fopen(path(key).c_str(), "rb");
  if (!file) return false;
  fseek(file, 0, SEEK_END);
  message.data.resize(ftell(file) - sizeof message.head);
  rewind(file);
  bool is_read = fread(&message.head, sizeof message.head, 1, file) == 1;
  if (is_read && !message.data.empty())
    is_read = fread(message.data.data(), message.data.size(), 1, file) == 1;
  fclose(file);
  return is_read;
}

/// Waits for a message. Returns false, and sets the error of the communicator, if none comes.
static bool get(Communicator& c, const std::string& key, Message& message) {
  double begin = seconds();
  for (int tries = 0; !take_if_there(c, key, message); ++tries) {
    if (c.is_aborted) return false;
    if (seconds() - begin > TIMEOUT) {
      simulated_print("NCCL: rank %d of %d waits in vain for %s", c.rank, c.size, key.c_str());
      simulated_count("nccl/timeouts", 1);
      c.error = REMOTE_ERROR;
      return false;
    }
    if (tries < 200)
      sched_yield();
    else
      usleep(50);
  }
  return true;
}

static void remove(const Communicator& c, const std::string& key) {
  if (c.is_local) {
    std::lock_guard guard(local().mutex);
    local().messages.erase(key);
  } else {
    unlink(path(key).c_str());
  }
}

// -- numbers -----------------------------------------------------------------------------------

enum Dtype { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, DTYPES };

enum { SUM, PRODUCT, MAX, MIN, AVERAGE };

static size_t size_of(int dtype) {
  static const size_t sizes[DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return dtype < DTYPES ? sizes[dtype] : 1;
}

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  BFloat16(float value) {  // to the nearest, to even in the middle
    uint32_t all;
    memcpy(&all, &value, sizeof all);
    bits = (uint16_t)((all + 0x7fff + ((all >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, sizeof value);
    return value;
  }
};

using Parts = std::vector<const char*>;  // the data of each rank

template <class Value, class Sum>
static void reduce(void* result, const Parts& parts, int64_t count, int operation) {
  for (int64_t i = 0; i < count; ++i) {
    Sum total = (Sum)((const Value*)parts[0])[i];
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      Sum value = (Sum)((const Value*)parts[rank])[i];
      total = operation == PRODUCT ? (Sum)(total * value)
              : operation == MAX   ? std::max(total, value)
              : operation == MIN   ? std::min(total, value)
                                   : (Sum)(total + value);
    }
    if (operation == AVERAGE) total = (Sum)(total / (Sum)parts.size());
    ((Value*)result)[i] = (Value)total;
  }
}

static void reduce(void* result, const Parts& parts, int64_t count, int dtype, int operation) {
  switch (dtype) {
    case INT8: return reduce<int8_t, int8_t>(result, parts, count, operation);
    case UINT8: return reduce<uint8_t, uint8_t>(result, parts, count, operation);
    case INT32: return reduce<int32_t, int32_t>(result, parts, count, operation);
    case UINT32: return reduce<uint32_t, uint32_t>(result, parts, count, operation);
    case INT64: return reduce<int64_t, int64_t>(result, parts, count, operation);
    case UINT64: return reduce<uint64_t, uint64_t>(result, parts, count, operation);
    case HALF: return reduce<_Float16, float>(result, parts, count, operation);
    case FLOAT: return reduce<float, float>(result, parts, count, operation);
    case DOUBLE: return reduce<double, double>(result, parts, count, operation);
    case BFLOAT16: return reduce<BFloat16, float>(result, parts, count, operation);
    default: simulated_missing("a reduction of this dtype by NCCL");
  }
}

// -- collectives -------------------------------------------------------------------------------

enum Kind {
  ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV
};

static const char* const NAMES[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter",
                                    "ncclBroadcast", "ncclReduce",    "ncclAlltoAll",
                                    "ncclGather",    "ncclScatter",   "ncclSend",
                                    "ncclRecv"};

/// A call of one rank. Its two halves are work of the stream, so that all calls of a group are
/// published before any of them waits.
struct Call {
  Head head;
  const char* send;
  char* recv;
  Communicator& c;
  void* stream;
  int64_t number = 0;  // of the calls of the communicator

  size_t bytes() const { return (size_t)head.count * size_of(head.dtype); }
  int peer() const { return head.root; }
  static std::string to(int rank) { return "to" + std::to_string(rank) + "-"; }

  void publish() {
    if (!MOVES || c.is_aborted || head.kind == RECV) return;
    if (head.kind == SEND)
      return put(c, key(c, to(peer()), c.sent[peer()]++, c.rank), head, send, bytes());
    number = c.calls++;
    bool only_root = head.kind == BROADCAST || head.kind == SCATTER;
    bool one_each = head.kind == REDUCE_SCATTER || head.kind == ALL_TO_ALL || head.kind == SCATTER;
    size_t size = only_root && c.rank != head.root ? 0 : bytes() * (one_each ? c.size : 1);
    put(c, key(c, "call", number, c.rank), head, send, size);
  }

  void collect() {
    if (c.is_aborted || head.kind == SEND) return;
    if (!MOVES) return pretend();
    if (head.kind == RECV) return receive();
    std::vector<Message> messages(c.size);
    for (int rank = 0; rank < c.size; ++rank) {
      if (!get(c, key(c, "call", number, rank), messages[rank])) return;
      if (!(messages[rank].head == head)) return mismatch(rank, messages[rank].head);
    }
    // All ranks have begun this call, so they have read what came before.
    remove(c, key(c, "call", number - 1, c.rank));
    finish(messages);
  }

 private:
  void receive() {
    auto message_key = key(c, to(c.rank), c.received[peer()]++, peer());
    Message message;
    if (!get(c, message_key, message)) return;
    memcpy(recv, message.data.data(), std::min(bytes(), message.data.size()));
    remove(c, message_key);
  }

  void finish(const std::vector<Message>& messages) {
    auto parts_from = [&](size_t at) {
      Parts parts;
      for (auto& message : messages) parts.push_back(message.data.data() + at);
      return parts;
    };
    size_t own = bytes() * c.rank;
    bool is_root = c.rank == head.root;
    bool only_root = head.kind == REDUCE || head.kind == GATHER;
    if (only_root && !is_root) return;
    switch (head.kind) {
      case ALL_REDUCE:
      case REDUCE:
        return reduce(recv, parts_from(0), head.count, head.dtype, head.operation);
      case REDUCE_SCATTER:
        return reduce(recv, parts_from(own), head.count, head.dtype, head.operation);
      case BROADCAST: memcpy(recv, messages[head.root].data.data(), bytes()); return;
      case SCATTER: memcpy(recv, messages[head.root].data.data() + own, bytes()); return;
      default:
        auto parts = parts_from(head.kind == ALL_TO_ALL ? own : 0);
        for (int rank = 0; rank < c.size; ++rank)
          memcpy(recv + rank * bytes(), parts[rank], bytes());
    }
  }

  /// Puts this rank's own part where it belongs.
  void pretend() {
    size_t own = bytes() * c.rank;
    if (head.kind == ALL_GATHER)
      memmove(recv + own, send, bytes());
    else if (head.kind == REDUCE_SCATTER)
      memmove(recv, send + own, bytes());
    else if (head.kind == ALL_REDUCE || (head.kind == BROADCAST && c.rank == head.root))
      memmove(recv, send, bytes());
  }

  void mismatch(int rank, const Head& other) {
    auto text = [](const Head& h) {
      return std::string(NAMES[h.kind]) + "(count=" + std::to_string(h.count) +
             ", dtype=" + std::to_string(h.dtype) + ", operation=" + std::to_string(h.operation) +
             ", root=" + std::to_string(h.root) + ")";
    };
    simulated_print("NCCL: MISMATCH in call %lld: rank %d calls %s, rank %d %s", (long long)number,
                    c.rank, text(head).c_str(), rank, text(other).c_str());
    simulated_count("nccl/MISMATCH", 1);
    c.error = INVALID_USAGE;  // a real NCCL hangs, or computes nonsense
  }
};

using Held = std::shared_ptr<Call>;

static void publish(void* held) { (*(Held*)held)->publish(); }
static void collect(void* held) { (*(Held*)held)->collect(); }
static void drop(void* held) { delete (Held*)held; }

/// Gives streams first what all calls publish, then what they read.
static Result run(const std::vector<Held>& calls) {
  auto& first = *calls[0];
  // If all ranks are of this process, nobody else would do the others' part of lazy streams.
  bool in_one_stream = simulated_is_lazy() && calls.size() > 1 && first.c.is_local;
  for (auto& call : calls) {
    auto& c = call->c;
    if (in_one_stream)
      simulated_join(first.c.device, first.stream, c.device, call->stream);
    else if (c.was_called)
      simulated_join(c.device, call->stream, c.device, c.last_stream);
    c.was_called = true, c.last_stream = call->stream;
  }
  int error = 0;
  for (auto half : {publish, collect})
    for (auto& call : calls) {
      auto& where = in_one_stream ? first : *call;
      bool begins = half == publish;
      auto* kind = begins ? "collective" : "end of collective";
      auto* name = begins ? NAMES[call->head.kind] : "";
      error |= simulated_stream_op(where.c.device, where.stream, kind, name, half, new Held(call), drop);
    }
  for (auto& call : calls)
    if (in_one_stream) simulated_join(call->c.device, call->stream, first.c.device, first.stream);
  return error ? UNHANDLED_CUDA : SUCCESS;
}

/// The calls between ncclGroupStart and ncclGroupEnd.
static thread_local int depth = 0;
static std::vector<Held>& grouped() {
  static thread_local auto* made = new std::vector<Held>;
  return *made;
}

static Result call(Kind kind, const void* send, void* recv, size_t count, int dtype, int operation,
                   int root, Communicator* c, void* stream) {
  simulated_count((std::string("nccl/") + NAMES[kind]).c_str(), 1);
  simulated_count((std::string("nccl bytes/") + NAMES[kind]).c_str(), count * size_of(dtype));
  simulated_trace("%s of %zu, dtype %d, rank %d of %d", NAMES[kind], count, dtype, c->rank, c->size);
  if (c->is_aborted) return INVALID_USAGE;
  if (!count) return SUCCESS;
  Head head{kind, dtype, operation, root, (int64_t)count};
  auto held = std::make_shared<Call>(head, (const char*)send, (char*)recv, *c, stream);
  if (!depth) return run({held});
  grouped().push_back(held);
  return SUCCESS;
}

API Result ncclGroupStart() {
  ++depth;
  return SUCCESS;
}

API Result ncclGroupEnd() {
  if (--depth || grouped().empty()) return SUCCESS;
  return run(std::exchange(grouped(), {}));
}

using Comm = Communicator*;

API Result ncclAllReduce(const void* send, void* recv, size_t n, int dtype, int op, Comm c, void* stream) {
  return call(ALL_REDUCE, send, recv, n, dtype, op, 0, c, stream);
}
API Result ncclAllGather(const void* send, void* recv, size_t n, int dtype, Comm c, void* stream) {
  return call(ALL_GATHER, send, recv, n, dtype, 0, 0, c, stream);
}
API Result ncclReduceScatter(const void* send, void* recv, size_t n, int dtype, int op, Comm c, void* stream) {
  return call(REDUCE_SCATTER, send, recv, n, dtype, op, 0, c, stream);
}
API Result ncclBroadcast(const void* send, void* recv, size_t n, int dtype, int root, Comm c, void* stream) {
  return call(BROADCAST, send, recv, n, dtype, 0, root, c, stream);
}
API Result ncclBcast(void* data, size_t n, int dtype, int root, Comm c, void* stream) {
  return call(BROADCAST, data, data, n, dtype, 0, root, c, stream);
}
API Result ncclReduce(const void* send, void* recv, size_t n, int dtype, int op, int root, Comm c, void* stream) {
  return call(REDUCE, send, recv, n, dtype, op, root, c, stream);
}
API Result ncclAlltoAll(const void* send, void* recv, size_t n, int dtype, Comm c, void* stream) {
  return call(ALL_TO_ALL, send, recv, n, dtype, 0, 0, c, stream);
}
API Result ncclGather(const void* send, void* recv, size_t n, int dtype, int root, Comm c, void* stream) {
  return call(GATHER, send, recv, n, dtype, 0, root, c, stream);
}
API Result ncclScatter(const void* send, void* recv, size_t n, int dtype, int root, Comm c, void* stream) {
  return call(SCATTER, send, recv, n, dtype, 0, root, c, stream);
}
API Result ncclSend(const void* send, size_t n, int dtype, int peer, Comm c, void* stream) {
  return call(SEND, send, nullptr, n, dtype, 0, peer, c, stream);
}
API Result ncclRecv(void* recv, size_t n, int dtype, int peer, Comm c, void* stream) {
  return call(RECV, nullptr, recv, n, dtype, 0, peer, c, stream);
}

// -- communicators -----------------------------------------------------------------------------

struct Id {
  char bytes[128];
};

API Result ncclGetVersion(int* version) {
  *version = VERSION;
  return SUCCESS;
}

API Result ncclGetUniqueId(Id* id) {
  unsigned long long random[2];
  *id = {};
  FILE* file = fopen("/dev/urandom", "rb");
  bool is_read = file && fread(random, sizeof random, 1, file) == 1;
  if (file) fclose(file);
  snprintf(id->bytes, sizeof id->bytes, "%016llx%016llx", random[0], random[1]);
  return is_read ? SUCCESS : SYSTEM_ERROR;
}

static Result refused(const std::string& why, Result error) {
  last_error = why;
  return error;
}

/// The first exchange of all: who is there, and on which device.
static Result meet(Communicator& c) {
  put(c, key(c, "meets", 0, c.rank), {}, &c.device, sizeof c.device);
  for (int rank = 0; rank < c.size; ++rank) {
    Message message;
    if (!get(c, key(c, "meets", 0, rank), message)) return refused("a rank is missing", SYSTEM_ERROR);
    int device = *(int*)message.data.data();
    if (rank != c.rank && device == c.device)
      return refused("Duplicate GPU detected : rank " + std::to_string(c.rank) + " and rank " +
                         std::to_string(rank) + " both on CUDA device " + std::to_string(device),
                     INVALID_USAGE);
  }
  return SUCCESS;
}

static Result join(Comm* made, const std::string& name, int size, int rank, int device, bool is_local) {
  auto* c = new Communicator{name, rank, size, device, is_local};  // never freed: calls refer to it
  simulated_count("nccl/communicators", 1);
  simulated_trace("NCCL communicator: rank %d of %d on device %d", rank, size, device);
  if (!is_local && MOVES && size > 1)
    if (auto error = meet(*c)) return error;
  *made = c;
  return SUCCESS;
}

API Result ncclCommInitRankConfig(Comm* made, int size, Id id, int rank, void*) {
  return join(made, id.bytes, size, rank, simulated_device(), false);
}

API Result ncclCommInitRank(Comm* made, int size, Id id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}

API Result ncclCommInitAll(Comm* made, int size, const int* devices) {
  Id id;
  if (auto error = ncclGetUniqueId(&id)) return error;
  for (int rank = 0; rank < size; ++rank) {
    int device = devices ? devices[rank] : rank;
    for (int other = 0; devices && other < rank; ++other)
      if (devices[other] == device) return refused("Duplicate GPU detected", INVALID_USAGE);
    join(&made[rank], id.bytes, size, rank, device, true);
  }
  return SUCCESS;
}

API Result ncclCommSplit(Comm c, int color, int order, Comm* made, void*) {
  *made = nullptr;
  int64_t number = c->splits++;
  int mine[2] = {color, order};
  put(*c, key(*c, "split", number, c->rank), {}, mine, sizeof mine);
  std::vector<std::pair<int, int>> members;  // by order, then by rank
  for (int rank = 0; rank < c->size; ++rank) {
    Message message;
    if (!get(*c, key(*c, "split", number, rank), message)) return SYSTEM_ERROR;
    auto* theirs = (int*)message.data.data();
    if (theirs[0] == color) members.push_back({theirs[1], rank});
  }
  if (color < 0) return SUCCESS;
  std::sort(members.begin(), members.end());
  int rank = 0;
  while (members[rank].second != c->rank) ++rank;
  auto name = c->name + "s" + std::to_string(number) + "-" + std::to_string(color);
  return join(made, name, members.size(), rank, c->device, c->is_local);
}

API Result ncclCommCount(Comm c, int* size) {
  *size = c->size;
  return SUCCESS;
}
API Result ncclCommUserRank(Comm c, int* rank) {
  *rank = c->rank;
  return SUCCESS;
}
API Result ncclCommGetAsyncError(Comm c, int* error) {
  *error = c->error;
  return SUCCESS;
}
API Result ncclCommFinalize(Comm) { return SUCCESS; }
API Result ncclCommAbort(Comm c) {
  simulated_count("nccl/aborts", 1);
  c->is_aborted = true;
  return SUCCESS;
}
API Result ncclCommDestroy(Comm c) {
  // The others may still read what the last call has published.
  if (!c->is_local && c->calls > 1) remove(*c, key(*c, "call", c->calls - 2, c->rank));
  c->is_aborted = true;
  return SUCCESS;
}

API const char* ncclGetErrorString(Result error) {
  switch (error) {
    case SUCCESS: return "no error";
    case UNHANDLED_CUDA: return "unhandled cuda error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "internal error";
  }
}
API const char* ncclGetLastError(Comm) { return last_error.c_str(); }

API Result ncclMemAlloc(void** memory, size_t size) {
  return cudaMalloc(memory, size) ? UNHANDLED_CUDA : SUCCESS;
}
API Result ncclMemFree(void* memory) { return cudaFree(memory) ? UNHANDLED_CUDA : SUCCESS; }
API Result ncclCommRegister(Comm, void* memory, size_t, void** handle) {
  *handle = memory;
  return SUCCESS;
}
API Result ncclCommDeregister(Comm, void*) { return SUCCESS; }
