// To preload: gloo's threads let go of a collective's tensors late, as on a busy machine.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>

static std::atomic<int> delay_ms{0};

extern "C" void slow_gloo(int ms) { delay_ms = ms; }

// What a thread calls when the collective has ended, before it lets go.
void std::condition_variable::notify_all() noexcept {
  using Notify = void (*)(std::condition_variable*);
  static const auto notify =
      reinterpret_cast<Notify>(dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv"));
  notify(this);
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (std::strcmp(name, "pt_gloo_runloop") != 0) return;
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(delay_ms.load());
  while (Clock::now() < end) {  // ready to run, not asleep
  }
}
