// A NCCL between processes of one machine (or in one), whose "device" memory is memory of the host. Data really moves, in order
// of the streams: each rank publishes what it sends as a file in /dev/shm, and reads what the others have published.
//
// Environment: SIMULATED_NCCL_MOVE=0 moves nothing and waits for nobody (for timing), SIMULATED_NCCL_TIMEOUT (60 s), SIMULATED_NCCL_US (0).
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>
#include "simulation.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
typedef int R;
enum { Success = 0, UnhandledCuda = 1, SystemError = 2, InternalError = 3, InvalidArgument = 4, InvalidUsage = 5, RemoteError = 6 };
struct Id { char bytes[128]; };
extern "C" int cudaMalloc(void**, size_t);
extern "C" int cudaFree(void*);

static double seconds() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static double setting(const char* n, double d) { const char* v = getenv(n); return v && *v ? atof(v) : d; }
static bool moves = setting("SIMULATED_NCCL_MOVE", 1) != 0;
static double limit = setting("SIMULATED_NCCL_TIMEOUT", 60), op_us = setting("SIMULATED_NCCL_US", 0);
EXPORT void simulated_nccl_move(int v) { moves = v; }
static thread_local std::string last;

// What a rank publishes for one call. Ranks whose calls do not match are told apart by it.
struct Head { int kind, dtype, op, root; int64_t count, bytes; };

struct Comm {
  std::string clique;
  int rank, size, device;
  bool local;  // all ranks in this process
  int64_t calls = 0, splits = 0;
  void* last_stream = nullptr;  // NCCL runs the calls of a communicator in their order, whatever their streams
  bool has_last = false;
  std::map<int, int64_t> sent, received;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{0};
};

// -- mailboxes ---------------------------------------------------------------------------------------------------------
static std::mutex& lock() { static auto* m = new std::mutex; return *m; }
static std::map<std::string, std::pair<Head, std::vector<char>>>& mail() { static auto* m = new std::map<std::string, std::pair<Head, std::vector<char>>>; return *m; }
static std::string key(const Comm& c, const char* what, int64_t number, int rank) {
  return c.clique + "." + what + std::to_string(number) + "." + std::to_string(rank);
}
static std::string path(const std::string& k) { return "/dev/shm/fakenccl-" + k; }
static void put(const Comm& c, const std::string& k, const Head& h, const void* data) {
  if (c.local) {
    std::lock_guard<std::mutex> g(lock());
    mail()[k] = {h, std::vector<char>((const char*)data, (const char*)data + h.bytes)};
    return;
  }
  std::string made = path(k) + ".new";
  int fd = open(made.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (fd < 0) { simulated_tracef("fake nccl: %s: %s", made.c_str(), strerror(errno)); return; }
  (void)!write(fd, &h, sizeof h);
  for (int64_t at = 0; at < h.bytes;) {
    ssize_t n = write(fd, (const char*)data + at, (size_t)(h.bytes - at));
    if (n <= 0) { simulated_tracef("fake nccl: write: %s", strerror(errno)); break; }
    at += n;
  }
  close(fd);
  rename(made.c_str(), path(k).c_str());
}
static bool get(Comm& c, const std::string& k, Head& h, std::vector<char>& data, bool removes) {
  double begin = seconds();
  for (int tries = 0;; ++tries) {
    if (c.local) {
      std::lock_guard<std::mutex> g(lock());
      auto it = mail().find(k);
      if (it != mail().end()) {
        h = it->second.first;
        data = it->second.second;
        if (removes) mail().erase(it);
        return true;
      }
    } else {
      int fd = open(path(k).c_str(), O_RDONLY);
      if (fd >= 0) {
        (void)!read(fd, &h, sizeof h);
        data.resize((size_t)h.bytes);
        for (int64_t at = 0; at < h.bytes;) {
          ssize_t n = read(fd, data.data() + at, (size_t)(h.bytes - at));
          if (n <= 0) break;
          at += n;
        }
        close(fd);
        if (removes) unlink(path(k).c_str());
        return true;
      }
    }
    if (c.aborted) return false;
    if (seconds() - begin > limit) {
      simulated_tracef("fake nccl: rank %d of %d has waited %g s for %s", c.rank, c.size, limit, k.c_str());
      simulated_count("nccl/TIMEOUT", 1);
      c.error = RemoteError;
      return false;
    }
    if (tries < 200) sched_yield(); else usleep(50);
  }
}

// -- numbers -----------------------------------------------------------------------------------------------------------
static size_t size_of(int dtype) { static const size_t n[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return dtype >= 0 && dtype < 12 ? n[dtype] : 1; }
struct BF16 {
  uint16_t b;
  operator float() const { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }
  BF16() = default;
  BF16(float f) { uint32_t u; memcpy(&u, &f, 4); b = (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16); }
};
template <class T, class A> static void reduce(void* out, const std::vector<std::vector<char>>& all, int64_t n, int op) {
  T* y = (T*)out;
  for (int64_t i = 0; i < n; ++i) {
    A total = (A)((const T*)all[0].data())[i];
    for (size_t r = 1; r < all.size(); ++r) {
      A v = (A)((const T*)all[r].data())[i];
      total = op == 1 ? (A)(total * v) : op == 2 ? std::max(total, v) : op == 3 ? std::min(total, v) : (A)(total + v);
    }
    if (op == 4) total = (A)(total / (A)all.size());
    y[i] = (T)total;
  }
}
static void reduce_any(void* out, const std::vector<std::vector<char>>& all, int64_t n, int dtype, int op) {
  switch (dtype) {
    case 0: reduce<int8_t, int8_t>(out, all, n, op); break;
    case 1: reduce<uint8_t, uint8_t>(out, all, n, op); break;
    case 2: reduce<int32_t, int32_t>(out, all, n, op); break;
    case 3: reduce<uint32_t, uint32_t>(out, all, n, op); break;
    case 4: reduce<int64_t, int64_t>(out, all, n, op); break;
    case 5: reduce<uint64_t, uint64_t>(out, all, n, op); break;
    case 6: reduce<_Float16, float>(out, all, n, op); break;
    case 7: reduce<float, float>(out, all, n, op); break;
    case 8: reduce<double, double>(out, all, n, op); break;
    case 9: reduce<BF16, float>(out, all, n, op); break;
    default: memcpy(out, all[0].data(), (size_t)n);
  }
}

// -- calls -------------------------------------------------------------------------------------------------------------
enum Kind { AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AlltoAll, Gather, Scatter, Send, Recv };
static const char* const NAMES[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclBroadcast", "ncclReduce", "ncclAlltoAll", "ncclGather", "ncclScatter", "ncclSend", "ncclRecv"};
struct Op {
  Kind kind;
  const void* send;
  void* recv;
  int64_t count;
  int dtype, op, root;  // root is the peer of send and recv
  Comm* comm;
  void* stream;
  int64_t number = 0;
  int uses = 2;
};
static void publish(void* arg) {
  Op& o = *(Op*)arg;
  Comm& c = *o.comm;
  if (!moves || c.aborted) return;
  int64_t unit = (int64_t)size_of(o.dtype);
  Head h{o.kind, o.dtype, o.op, o.root, o.count, 0};
  if (o.kind == Send) {
    h.bytes = o.count * unit;
    put(c, key(c, ("p" + std::to_string(o.root) + "-").c_str(), c.sent[o.root]++, c.rank), h, o.send);
    return;
  }
  if (o.kind == Recv) return;
  o.number = c.calls++;
  bool sends = !(o.kind == Broadcast || o.kind == Scatter) || c.rank == o.root;
  int64_t parts = o.kind == ReduceScatter || o.kind == AlltoAll || o.kind == Scatter ? c.size : 1;
  h.bytes = sends ? o.count * unit * parts : 0;
  put(c, key(c, "c", o.number, c.rank), h, o.send);
}
static void collect(void* arg) {
  Op& o = *(Op*)arg;
  Comm& c = *o.comm;
  size_t bytes = (size_t)o.count * size_of(o.dtype);
  if (c.aborted) return;
  if (!moves) {
    if (o.kind == AllGather) memmove((char*)o.recv + c.rank * bytes, o.send, bytes);
    else if (o.kind == ReduceScatter) memmove(o.recv, (const char*)o.send + c.rank * bytes, bytes);
    else if (o.kind == AllReduce || (o.kind == Broadcast && c.rank == o.root)) { if (o.recv != o.send) memmove(o.recv, o.send, bytes); }
    return;
  }
  if (o.kind == Send) return;
  Head h;
  if (o.kind == Recv) {
    std::vector<char> data;
    if (get(c, key(c, ("p" + std::to_string(c.rank) + "-").c_str(), c.received[o.root]++, o.root), h, data, true)) memcpy(o.recv, data.data(), std::min(bytes, data.size()));
    return;
  }
  std::vector<std::vector<char>> all((size_t)c.size);
  for (int r = 0; r < c.size; ++r) {
    if (!get(c, key(c, "c", o.number, r), h, all[(size_t)r], false)) return;
    if (h.kind != o.kind || h.dtype != o.dtype || h.op != o.op || h.root != o.root || h.count != o.count) {
      simulated_tracef("fake nccl: MISMATCH in call %lld: rank %d calls %s(count=%lld, dtype=%d, op=%d, root=%d), rank %d calls %s(count=%lld, dtype=%d, op=%d, root=%d)", (long long)o.number,
                  c.rank, NAMES[o.kind], (long long)o.count, o.dtype, o.op, o.root, r, NAMES[h.kind], (long long)h.count, h.dtype, h.op, h.root);
      simulated_count("nccl/MISMATCH", 1);
      return;
    }
  }
  // All ranks have begun this call, so they have read what came before.
  if (o.number > 0) {
    std::string before = key(c, "c", o.number - 1, c.rank);
    if (c.local) { std::lock_guard<std::mutex> g(lock()); mail().erase(before); } else unlink(path(before).c_str());
  }
  auto part = [&](int r, size_t at) { memcpy((char*)o.recv + (o.kind == AllGather || o.kind == Gather || o.kind == AlltoAll ? (size_t)r * bytes : 0), all[(size_t)r].data() + at, bytes); };
  switch (o.kind) {
    case AllReduce: reduce_any(o.recv, all, o.count, o.dtype, o.op); break;
    case Reduce: if (c.rank == o.root) reduce_any(o.recv, all, o.count, o.dtype, o.op); break;
    case ReduceScatter:
      for (auto& d : all) d.erase(d.begin(), d.begin() + (long)(bytes * (size_t)c.rank));
      reduce_any(o.recv, all, o.count, o.dtype, o.op);
      break;
    case AllGather: for (int r = 0; r < c.size; ++r) part(r, 0); break;
    case Gather: if (c.rank == o.root) for (int r = 0; r < c.size; ++r) part(r, 0); break;
    case AlltoAll: for (int r = 0; r < c.size; ++r) part(r, bytes * (size_t)c.rank); break;
    case Scatter: memcpy(o.recv, all[(size_t)o.root].data() + bytes * (size_t)c.rank, bytes); break;
    case Broadcast: memcpy(o.recv, all[(size_t)o.root].data(), bytes); break;
    default: break;
  }
}
static thread_local int depth = 0;
static thread_local std::vector<Op*>* waiting;
static void drop(void* arg) { if (--((Op*)arg)->uses == 0) delete (Op*)arg; }
static R run(std::vector<Op*>& ops) {
  R result = Success;
  if (simulated_is_lazy() && ops.size() > 1 && ops[0]->comm->local) {  // ranks of this process: nobody else would do the others' part
    Op *first = ops[0];
    for (Op* o : ops) simulated_join(first->comm->device, first->stream, o->comm->device, o->stream);
    std::vector<std::pair<int, void*>> streams;
    for (Op* o : ops) streams.push_back({o->comm->device, o->stream});
    auto [d, st] = streams[0];
    for (Op* o : ops) simulated_stream_op(d, st, NAMES[o->kind], publish, o, drop, op_us);
    for (Op* o : ops) simulated_stream_op(d, st, "", collect, o, drop, 0);
    for (auto& [e, t] : streams) simulated_join(e, t, d, st);
    return Success;
  }
  if (simulated_is_lazy())
    for (Op* o : ops) {
      Comm& c = *o->comm;
      if (c.has_last && c.last_stream != o->stream) simulated_join(c.device, o->stream, c.device, c.last_stream);
      c.last_stream = o->stream;
      c.has_last = true;
    }
  for (Op* o : ops) if (simulated_stream_op(o->comm->device, o->stream, NAMES[o->kind], publish, o, drop, op_us)) result = UnhandledCuda;
  for (Op* o : ops) if (simulated_stream_op(o->comm->device, o->stream, "", collect, o, drop, 0)) result = UnhandledCuda;
  return result;
}
static R call(Kind kind, const void* send, void* recv, size_t count, int dtype, int op, int root, Comm* c, void* stream) {
  simulated_count((std::string("nccl/") + NAMES[kind]).c_str(), 1);
  simulated_count((std::string("nccl bytes/") + NAMES[kind]).c_str(), (long long)(count * size_of(dtype)));
  if (simulated_trace()) simulated_tracef("%s(count=%zu, dtype=%d, op=%d, root=%d, rank=%d of %d, stream=%p)", NAMES[kind], count, dtype, op, root, c->rank, c->size, stream);
  if (c->aborted) return InvalidUsage;
  if (!count) return Success;
  auto* o = new Op{kind, send, recv, (int64_t)count, dtype, op, root, c, stream};
  if (depth) {
    if (!waiting) waiting = new std::vector<Op*>;
    waiting->push_back(o);
    return Success;
  }
  std::vector<Op*> one{o};
  return run(one);
}
EXPORT R ncclGroupStart() { ++depth; return Success; }
EXPORT R ncclGroupEnd() {
  if (--depth || !waiting) return Success;
  std::vector<Op*> ops;
  ops.swap(*waiting);
  return run(ops);
}
EXPORT R ncclGroupSimulateEnd(void*) { return Success; }
EXPORT R ncclAllReduce(const void* s, void* r, size_t n, int t, int op, Comm* c, void* st) { return call(AllReduce, s, r, n, t, op, 0, c, st); }
EXPORT R ncclAllGather(const void* s, void* r, size_t n, int t, Comm* c, void* st) { return call(AllGather, s, r, n, t, 0, 0, c, st); }
EXPORT R ncclReduceScatter(const void* s, void* r, size_t n, int t, int op, Comm* c, void* st) { return call(ReduceScatter, s, r, n, t, op, 0, c, st); }
EXPORT R ncclBroadcast(const void* s, void* r, size_t n, int t, int root, Comm* c, void* st) { return call(Broadcast, s, r, n, t, 0, root, c, st); }
EXPORT R ncclBcast(void* b, size_t n, int t, int root, Comm* c, void* st) { return call(Broadcast, b, b, n, t, 0, root, c, st); }
EXPORT R ncclReduce(const void* s, void* r, size_t n, int t, int op, int root, Comm* c, void* st) { return call(Reduce, s, r, n, t, op, root, c, st); }
EXPORT R ncclAlltoAll(const void* s, void* r, size_t n, int t, Comm* c, void* st) { return call(AlltoAll, s, r, n, t, 0, 0, c, st); }
EXPORT R ncclGather(const void* s, void* r, size_t n, int t, int root, Comm* c, void* st) { return call(Gather, s, r, n, t, 0, root, c, st); }
EXPORT R ncclScatter(const void* s, void* r, size_t n, int t, int root, Comm* c, void* st) { return call(Scatter, s, r, n, t, 0, root, c, st); }
EXPORT R ncclSend(const void* s, size_t n, int t, int peer, Comm* c, void* st) { return call(Send, s, nullptr, n, t, 0, peer, c, st); }
EXPORT R ncclRecv(void* r, size_t n, int t, int peer, Comm* c, void* st) { return call(Recv, nullptr, r, n, t, 0, peer, c, st); }

// -- communicators -----------------------------------------------------------------------------------------------------
EXPORT R ncclGetVersion(int* v) { *v = 23007; return Success; }
EXPORT R ncclGetUniqueId(Id* id) {
  memset(id, 0, sizeof *id);
  unsigned long long r[2];
  int fd = open("/dev/urandom", O_RDONLY);
  (void)!read(fd, r, sizeof r);
  close(fd);
  snprintf(id->bytes, sizeof id->bytes, "%016llx%016llx", r[0], r[1]);
  return Success;
}
EXPORT R ncclCommGetUniqueId(Comm*, Id* id) { return ncclGetUniqueId(id); }
static R join(Comm** out, const std::string& clique, int size, int rank, bool local) {
  auto* c = new Comm;
  c->clique = clique; c->rank = rank; c->size = size; c->device = simulated_device(); c->local = local;
  simulated_count("nccl/communicators", 1);
  if (simulated_trace()) simulated_tracef("nccl communicator %s: rank %d of %d on device %d", clique.c_str(), rank, size, c->device);
  if (!local && moves && size > 1) {
    // Like the first call of all: who is there, and on which device.
    Head h{100, 0, 0, 0, c->device, sizeof(int)};
    put(*c, key(*c, "i", 0, rank), h, &c->device);
    for (int r = 0; r < size; ++r) {
      std::vector<char> data;
      if (!get(*c, key(*c, "i", 0, r), h, data, false)) { last = "a rank is missing"; return SystemError; }
      if (r != rank && h.count == c->device) {
        last = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(r) + " both on CUDA device " + std::to_string(c->device + 1) + "000";
        return InvalidUsage;
      }
    }
  }
  *out = c;
  return Success;
}
EXPORT R ncclCommInitRankConfig(Comm** c, int size, Id id, int rank, void*) { return join(c, std::string(id.bytes, strnlen(id.bytes, 64)), size, rank, false); }
EXPORT R ncclCommInitRank(Comm** c, int size, Id id, int rank) { return ncclCommInitRankConfig(c, size, id, rank, nullptr); }
EXPORT R ncclCommInitRankScalable(Comm** c, int size, int rank, int, Id* id, void*) { return ncclCommInitRankConfig(c, size, id[0], rank, nullptr); }
EXPORT R ncclCommInitAll(Comm** comms, int n, const int* devices) {
  Id id;
  ncclGetUniqueId(&id);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < i; ++j)
      if (devices && devices[i] == devices[j]) { last = "Duplicate GPU detected"; return InvalidUsage; }
  for (int i = 0; i < n; ++i) {
    join(&comms[i], std::string(id.bytes), n, i, true);
    comms[i]->device = devices ? devices[i] : i;
  }
  return Success;
}
EXPORT R ncclCommSplit(Comm* c, int color, int rank_key, Comm** out, void*) {
  *out = nullptr;
  int64_t number = c->splits++;
  int mine[2] = {color, rank_key};
  Head h{101, 0, 0, 0, 0, sizeof mine};
  put(*c, key(*c, "s", number, c->rank), h, mine);
  std::vector<std::pair<int, int>> members;
  for (int r = 0; r < c->size; ++r) {
    std::vector<char> data;
    if (!get(*c, key(*c, "s", number, r), h, data, false)) return SystemError;
    int theirs[2];
    memcpy(theirs, data.data(), sizeof theirs);
    if (theirs[0] == color) members.push_back({theirs[1], r});
  }
  if (color < 0) return Success;
  std::sort(members.begin(), members.end());
  int rank = 0;
  while (members[(size_t)rank].second != c->rank) ++rank;
  return join(out, c->clique + "s" + std::to_string(number) + "-" + std::to_string(color), (int)members.size(), rank, c->local);
}
EXPORT R ncclCommCount(Comm* c, int* n) { *n = c->size; return Success; }
EXPORT R ncclCommUserRank(Comm* c, int* n) { *n = c->rank; return Success; }
EXPORT R ncclCommCuDevice(Comm* c, int* n) { *n = c->device; return Success; }
EXPORT R ncclCommGetAsyncError(Comm* c, R* e) { *e = c->error; return Success; }
EXPORT R ncclCommAbort(Comm* c) { simulated_count("nccl/aborts", 1); c->aborted = true; return Success; }
EXPORT R ncclCommFinalize(Comm* c) { return Success; }
EXPORT R ncclCommRevoke(Comm* c, int) { c->aborted = true; return Success; }
static void clean(Comm* c) {
  if (c->local || !moves || c->size < 2) return;
  // The others have begun the last call at the earliest, so what came before may go. The last file stays for them.
  unlink(path(key(*c, "c", c->calls - 2, c->rank)).c_str());
}
EXPORT R ncclCommDestroy(Comm* c) { clean(c); c->aborted = true; return Success; }
EXPORT const char* ncclGetErrorString(R r) {
  static const char* const t[] = {"no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "unhandled system error (run with NCCL_DEBUG=INFO for details)", "internal error - please report this issue to the NCCL developers",
                                  "invalid argument (run with NCCL_DEBUG=WARN for details)", "invalid usage (run with NCCL_DEBUG=WARN for details)", "remote process exited or there was a network error", "NCCL operation in progress"};
  return r >= 0 && r < 8 ? t[r] : "unknown result code";
}
EXPORT const char* ncclGetLastError(Comm*) { return last.c_str(); }
EXPORT R ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) ? UnhandledCuda : Success; }
EXPORT R ncclMemFree(void* p) { return cudaFree(p) ? UnhandledCuda : Success; }
EXPORT R ncclCommRegister(Comm*, void* b, size_t, void** h) { *h = b; return Success; }
EXPORT R ncclCommDeregister(Comm*, void*) { return Success; }
EXPORT R ncclCommWindowRegister(Comm*, void* b, size_t, void** w, int) { *w = b; return Success; }
EXPORT R ncclCommWindowDeregister(Comm*, void*) { return Success; }
EXPORT R ncclWinGetUserPtr(Comm*, void* w, void** p) { *p = w; return Success; }
EXPORT R ncclRedOpCreatePreMulSum(int* op, void*, int, int, Comm*) { *op = 0; simulated_count("nccl/premul sum taken as sum", 1); return Success; }
EXPORT R ncclRedOpDestroy(int, Comm*) { return Success; }
