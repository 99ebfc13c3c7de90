// Streams that run asynchronously, events, and graphs captured from them: as strict as a driver is
// while a stream is being captured.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace emulation {

using Work = std::function<void()>;

// This thread's interaction with captures, as the driver numbers it; 0 is the strict one, 2
// relaxed.
inline thread_local int32_t capture_mode = 0;

// CUDA's names for these.
inline constexpr int32_t kSuccess = 0, kInvalid = 1, kNotReady = 600, kCaptureUnsupported = 900,
                         kCaptureInvalidated = 901, kCaptureUnjoined = 904, kCaptureIsolation = 905,
                         kCapturedEvent = 907, kCooperativeTooLarge = 720;

// Runs queued operations one after another in its own thread.
class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}

  void enqueue(Work work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const Work work = queue_.front();
      lock.unlock();
      work();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;  // the first is under way
  std::thread thread_;
};

// How much of each stream is ordered before an event.
using Progress = std::map<void*, uint64_t>;

inline void merge(Progress& into, const Progress& other) {
  for (const auto& [stream, count] : other) into[stream] = std::max(into[stream], count);
}

// In the order of their capture, which is one that their dependencies allow.
struct Graph {
  uint64_t id = 0;
  void* origin = nullptr;
  bool spoiled = false;  // by a call that a capture cannot have
  std::vector<Work> works;
  std::map<void*, Progress> seen;  // by each stream that takes part, of itself too
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  uint64_t capture = 0;  // that it was last recorded in; 0: none
  Progress before;       // of that capture

  void reach(uint64_t record) {
    {
      const std::lock_guard lock(mutex);
      reached = std::max(reached, record);
    }
    changed.notify_all();
  }
  void wait(uint64_t record) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= record; });
  }
};

// All streams of a process. They live as long as it does, and so do their threads.
class Streams {
 public:
  static Streams& instance() {
    static auto* const streams = new Streams;
    return *streams;
  }

  // Now, or as a part of the graph that is being captured.
  void enqueue(void* handle, Work work) {
    std::unique_lock lock(mutex_);
    if (Graph* const graph = graph_of(handle)) {
      graph->works.push_back(std::move(work));
      ++graph->seen[handle][handle];
      return;
    }
    stream(handle).enqueue(std::move(work));
  }

  // A copy from memory that is not page-locked: read now, in its place once the legacy stream, or
  // the context, has been waited for. Copies follow each other.
  void stage(void* to, const void* from, size_t bytes) {
    const std::lock_guard lock(mutex_);
    deliver_staged();
    const auto* const begin = static_cast<const char*>(from);
    staged_.assign(begin, begin + bytes);
    staged_to_ = to;
  }
  void synchronize_legacy() {
    const std::lock_guard lock(mutex_);
    deliver_staged();
  }

  void synchronize() {
    std::vector<Stream*> all;
    {
      const std::lock_guard lock(mutex_);
      deliver_staged();
      for (const auto& [handle, stream] : all_) all.push_back(stream);
    }
    for (Stream* const stream : all) stream->synchronize();
  }
  void synchronize(void* handle) {
    std::unique_lock lock(mutex_);
    Stream& one = stream(handle);
    lock.unlock();
    one.synchronize();
  }

  int32_t record(Event* event, void* handle) {
    std::unique_lock lock(mutex_);
    Graph* const graph = graph_of(handle);
    const std::lock_guard event_lock(event->mutex);
    event->capture = graph == nullptr ? 0 : graph->id;
    if (graph != nullptr) {
      event->before = graph->seen[handle];
      return kSuccess;
    }
    const uint64_t record = ++event->recorded;
    stream(handle).enqueue([=] { event->reach(record); });
    return kSuccess;
  }

  int32_t wait(void* handle, Event* event) {
    std::unique_lock lock(mutex_);
    Graph* const graph = graph_of(handle);
    uint64_t record;
    {
      const std::lock_guard event_lock(event->mutex);
      if (graph != nullptr && event->capture != graph->id) return kCaptureIsolation;
      if (event->capture != 0) {
        const auto found = capturing_.find(event->capture);
        if (found == capturing_.end()) return kCapturedEvent;  // that capture is over
        merge(found->second->seen[handle], event->before);     // from now on it takes part
        return kSuccess;
      }
      record = event->recorded;
    }
    stream(handle).enqueue([=] { event->wait(record); });
    return kSuccess;
  }

  int32_t query(Event* event) {
    const std::lock_guard lock(mutex_);
    if (refuses_unlocked()) return kCaptureUnsupported;
    const std::lock_guard event_lock(event->mutex);
    if (event->capture != 0) return kCapturedEvent;
    return event->reached >= event->recorded ? kSuccess : kNotReady;
  }

  // Whether what this thread asks for is refused. All captures are as strict as can be (global), so
  // that they are spoiled too, and end with an error.
  bool refuses() {
    const std::lock_guard lock(mutex_);
    return refuses_unlocked();
  }
  // The same for what waits for all streams: no mode of the thread helps.
  bool spoil_captures() {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, graph] : capturing_) graph->spoiled = true;
    return !capturing_.empty();
  }

  uint64_t capture_of(void* handle, bool* spoiled = nullptr) {
    const std::lock_guard lock(mutex_);
    const Graph* const graph = graph_of(handle);
    if (graph != nullptr && spoiled != nullptr) *spoiled = graph->spoiled;
    return graph == nullptr ? 0 : graph->id;
  }

  void begin_capture(void* handle) {
    const std::lock_guard lock(mutex_);
    auto* const graph = new Graph;
    graph->id = ++captures_;
    graph->origin = handle;
    graph->seen[handle] = {};
    capturing_[graph->id] = graph;
  }

  int32_t end_capture(void* handle, Graph** captured) {
    const std::lock_guard lock(mutex_);
    Graph* const graph = graph_of(handle);
    *captured = graph;
    if (graph == nullptr || graph->origin != handle) return kInvalid;
    capturing_.erase(graph->id);
    if (graph->spoiled) return kCaptureInvalidated;
    Progress& joined = graph->seen[handle];
    for (const auto& [stream, seen] : graph->seen)
      for (const auto& [other, count] : seen)
        if (joined[other] < count) return kCaptureUnjoined;
    return kSuccess;
  }

  // May be called any number of times. The graph lives as long as the process.
  void replay(const Graph* graph, void* handle) {
    for (const Work& work : graph->works) enqueue(handle, work);
  }

 private:
  bool refuses_unlocked() {
    if (capturing_.empty() || capture_mode == 2) return false;
    for (const auto& [id, graph] : capturing_) graph->spoiled = true;
    return true;
  }
  void deliver_staged() {
    if (!staged_.empty()) std::memcpy(staged_to_, staged_.data(), staged_.size());
    staged_.clear();
  }
  Graph* graph_of(void* handle) {
    for (const auto& [id, graph] : capturing_)
      if (graph->seen.count(handle) != 0) return graph;
    return nullptr;
  }
  Stream& stream(void* handle) {
    Stream*& stream = all_[handle];
    if (stream == nullptr) stream = new Stream;
    return *stream;
  }

  std::mutex mutex_;
  std::map<void*, Stream*> all_;
  std::map<uint64_t, Graph*> capturing_;
  uint64_t captures_ = 0;
  std::vector<char> staged_;
  void* staged_to_ = nullptr;
};

}  // namespace emulation
