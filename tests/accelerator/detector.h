// Finds accesses of memory by two streams that nothing orders, and memory that is freed too early.
//
// The method is vector clocks (Lamport 1978; Mattern 1989). A stream counts its operations. Its
// clock says, for each stream, how many operations have ended before its next one begins: all of its
// own, and what it has waited for. Two accesses of the same memory, one of them a write, must be
// ordered by these clocks. Nothing here depends on when an operation really runs, so a missing
// event is found in every run, however fast the machine is.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

/// A stream of a device.
using Stream = std::pair<int, std::int64_t>;

inline std::string str(Stream stream) {
  std::ostringstream text;
  text << "stream " << stream.second << " of device " << stream.first;
  return text.str();
}

/// The number of operations of each stream that have ended.
class Clock {
 public:
  void join(const Clock& other) {
    for (auto [stream, time] : other.times_) times_[stream] = std::max(times_[stream], time);
  }
  std::uint64_t tick(Stream stream) { return ++times_[stream]; }
  bool covers(Stream stream, std::uint64_t time) const {
    auto found = times_.find(stream);
    return found != times_.end() && found->second >= time;
  }

 private:
  std::map<Stream, std::uint64_t> times_;
};

/// One access of a block of memory, by an operation of a stream.
struct Access {
  Stream stream;
  std::uint64_t time;
  std::string operation;
};

class Detector {
 public:
  /// Memory belongs to the stream that is current when it is allocated. Once it is freed, the next
  /// operation of this stream may use it for something else, as in torch's caching allocators.
  void allocate(void* block, Stream owner) {
    std::lock_guard guard(mutex_);
    blocks_[block] = Block{owner, {}, {}, {}};
  }

  void free(void* block) {
    std::lock_guard guard(mutex_);
    auto found = blocks_.find(block);
    if (found == blocks_.end()) return;
    auto& [owner, users, writes, reads] = found->second;
    for (auto* accesses : {&writes, &reads})
      for (auto& [stream, access] : *accesses)
        if (!users.count(stream)) check("free", owner, access);
    blocks_.erase(found);
  }

  /// The `record_stream` of a tensor: its memory is not used again before the stream gets there.
  void record_stream(void* block, Stream user) {
    std::lock_guard guard(mutex_);
    auto found = blocks_.find(block);
    if (found != blocks_.end()) found->second.users.insert(user);
  }

  /// An operation that a stream runs after all that it has been given before.
  void run(const std::string& operation, Stream stream, const std::vector<void*>& reads,
           const std::vector<void*>& writes) {
    std::lock_guard guard(mutex_);
    auto time = clocks_[stream].tick(stream);
    for (void* block : reads) access(block, {stream, time, operation}, /*writes=*/false);
    for (void* block : writes) access(block, {stream, time, operation}, /*writes=*/true);
  }

  /// An event: all that the stream has been given so far.
  Clock record(Stream stream) {
    std::lock_guard guard(mutex_);
    clocks_[stream].tick(stream);
    return clocks_[stream];
  }

  void wait(Stream stream, const Clock& event) {
    std::lock_guard guard(mutex_);
    clocks_[stream].join(event);
  }

  /// The host waits: whatever it starts next, on any stream, comes later.
  void host_waits(const Clock& event) {
    std::lock_guard guard(mutex_);
    host_.join(event);
  }

  void host_waits_for_device(int device) {
    std::lock_guard guard(mutex_);
    for (auto& [stream, clock] : clocks_)
      if (stream.first == device) host_.join(clock);
  }

  void found(const std::string& text) {
    std::lock_guard guard(mutex_);
    findings_.insert(text);
  }

  /// Returns what was found since the last call.
  std::vector<std::string> take_findings() {
    std::lock_guard guard(mutex_);
    std::vector<std::string> taken(findings_.begin(), findings_.end());
    findings_.clear();
    return taken;
  }

 private:
  struct Block {
    Stream owner;
    std::set<Stream> users;
    std::map<Stream, Access> writes, reads;  // the last one of each stream
  };

  void access(void* block, const Access& access, bool writes) {
    auto found = blocks_.find(block);
    if (found == blocks_.end()) return;  // memory of the host, or of no size
    Block& b = found->second;
    for (auto& [_, before] : b.writes) check(access.operation, access.stream, before);
    if (writes) {
      for (auto& [_, before] : b.reads) check(access.operation, access.stream, before);
      b.writes.clear();
      b.reads.clear();
    }
    (writes ? b.writes : b.reads)[access.stream] = access;
  }

  void check(const std::string& operation, Stream stream, const Access& before) {
    bool ordered = before.stream == stream || host_.covers(before.stream, before.time) ||
                   clocks_[stream].covers(before.stream, before.time);
    if (!ordered)
      findings_.insert(operation + " on " + str(stream) + " does not wait for " +
                       before.operation + " on " + str(before.stream));
  }

  std::mutex mutex_;
  std::map<Stream, Clock> clocks_;
  Clock host_;
  std::map<void*, Block> blocks_;
  std::set<std::string> findings_;
};

}  // namespace simulated
