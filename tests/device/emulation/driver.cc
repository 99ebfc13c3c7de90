// The driver's functions over the emulated device, as a library for the Python tests: streams that
// run in their own time, events, and the kernels themselves.
#include <deque>
#include <map>
#include <string>

#include "cuda/notice.cuh"
#include "cuda/replicate.cuh"

namespace {

constexpr int32_t kSuccess = 0, kInvalid = 1, kNotReady = 600;

// Does what it is given, one after the other, in a thread of its own.
class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}

  void enqueue(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  void settle() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> work = queue_.front();
      lock.unlock();
      work();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // the first is under way
  std::thread thread_;
};

// Streams live as long as the process, as their threads do.
struct Streams {
  std::mutex mutex;
  std::map<void*, Stream*> all;

  Stream& of(void* handle) {
    const std::lock_guard lock(mutex);
    Stream*& stream = all[handle];
    if (stream == nullptr) stream = new Stream;
    return *stream;
  }
  static Streams& instance() {
    static auto* const streams = new Streams;
    return *streams;
  }
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;

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

const char* const kKernels[] = {"ultraep_replicate_16384", "ultraep_replicate_32768",
                                "ultraep_replicate_notice"};

template <int64_t kTileBytes>
void replicate(const uec::cuda::LaunchArgs& args, int32_t blocks, int32_t ranks, int64_t shared) {
  emulation::launch(blocks, ranks, shared, [&](std::byte* memory) {
    uec::cuda::replicate<kTileBytes, false>(args, memory);
  });
}

void notify(uec::cuda::RankState& state, uec::cuda::Notice notice) {
  using uec::cuda::BlockCall, uec::cuda::Ring;
  emulation::launch(
      1, 1, sizeof(BlockCall) + sizeof(Ring),
      [&](std::byte* memory) {
        uec::cuda::notify<false>(state, notice, *reinterpret_cast<BlockCall*>(memory),
                                 *reinterpret_cast<Ring*>(memory + sizeof(BlockCall)));
      },
      1);
}

}  // namespace

extern "C" {

// ---- what a device gives a test -----------------------------------------------------------------

void* emulated_kernel(const char* name) {
  for (size_t i = 0; i < std::size(kKernels); ++i)
    if (std::string(name) == kKernels[i]) return reinterpret_cast<void*>(i + 1);
  return nullptr;
}

void emulated_settle() {
  std::vector<Stream*> streams;
  {
    const std::lock_guard lock(Streams::instance().mutex);
    for (const auto& [handle, stream] : Streams::instance().all) streams.push_back(stream);
  }
  for (Stream* const stream : streams) stream->settle();
}

// Keeps a stream busy for so long.
void emulated_delay(void* stream, int64_t microseconds) {
  Streams::instance().of(stream).enqueue(
      [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

// Copies in the order of a stream: as work of the caller's before and after a call.
void emulated_copy(void* to, const void* from, uint64_t bytes, void* stream) {
  Streams::instance().of(stream).enqueue([=] { std::memcpy(to, from, bytes); });
}

// ---- the driver ---------------------------------------------------------------------------------

int32_t cuCtxPushCurrent(void*) { return kSuccess; }
int32_t cuCtxPopCurrent(void**) { return kSuccess; }

int32_t cuMemcpyHtoD(uint64_t to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}

int32_t cuMemcpyDtoH(void* to, uint64_t from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}

int32_t cuMemcpyHtoDAsync(uint64_t to, const void* from, size_t bytes, void* stream) {
  emulated_copy(reinterpret_cast<void*>(to), from, bytes, stream);
  return kSuccess;
}

int32_t cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return kSuccess;
}

int32_t cuEventDestroy(void*) { return kSuccess; }  // streams may still refer to it

int32_t cuEventRecord(void* handle, void* stream) {
  auto* const event = static_cast<Event*>(handle);
  uint64_t record;
  {
    const std::lock_guard lock(event->mutex);
    record = ++event->recorded;
  }
  Streams::instance().of(stream).enqueue([=] { event->reach(record); });
  return kSuccess;
}

int32_t cuEventQuery(void* handle) {
  auto* const event = static_cast<Event*>(handle);
  const std::lock_guard lock(event->mutex);
  return event->reached >= event->recorded ? kSuccess : kNotReady;
}

int32_t cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  auto* const event = static_cast<Event*>(handle);
  uint64_t record;
  {
    const std::lock_guard lock(event->mutex);
    record = event->recorded;
  }
  Streams::instance().of(stream).enqueue([=] { event->wait(record); });
  return kSuccess;
}

int32_t cuStreamIsCapturing(void*, int32_t* status) {
  *status = 0;
  return kSuccess;
}

int32_t cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned, unsigned, unsigned,
                       unsigned, unsigned shared, void* handle, void** arguments, void**) {
  Stream& stream = Streams::instance().of(handle);
  const auto blocks = static_cast<int32_t>(grid_x), ranks = static_cast<int32_t>(grid_y);
  switch (reinterpret_cast<uintptr_t>(kernel)) {
    case 1:
    case 2: {
      const auto args = *static_cast<const uec::cuda::LaunchArgs*>(arguments[0]);
      const bool small = reinterpret_cast<uintptr_t>(kernel) == 1;
      stream.enqueue(
          [=] { (small ? replicate<16384> : replicate<32768>)(args, blocks, ranks, shared); });
      return kSuccess;
    }
    case 3: {
      auto* const state =
          reinterpret_cast<uec::cuda::RankState*>(*static_cast<const uint64_t*>(arguments[0]));
      const auto notice = *static_cast<const uec::cuda::Notice*>(arguments[1]);
      stream.enqueue([=] { notify(*state, notice); });
      return kSuccess;
    }
    default:
      return kInvalid;
  }
}

int32_t cuGetErrorName(int32_t, const char** name) {
  *name = "CUDA_ERROR_OF_THE_EMULATION";
  return kSuccess;
}
int32_t cuGetErrorString(int32_t, const char** text) {
  *text = "the emulated device does not know this";
  return kSuccess;
}

}  // extern "C"
