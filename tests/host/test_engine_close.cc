// close() ends the engine's own threads, also one that is about to sleep.
//
// The window in which a wake-up can be lost, between a thread's last look and its sleep, is held
// open by standing in for the two functions that condition variables are made of.
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// The background thread is the only one that waits without a limit, and so with pthread_cond_wait.
struct Window {
  std::atomic<bool> armed{false}, held{false}, hold_next{false}, woken{false};
  std::atomic<pthread_cond_t*> queued{nullptr};  // what the background thread waits on
} window;

thread_local bool closes = false;  // this thread is in the close() that is tested

template <class F>
F* next_definition(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  static const auto next = next_definition<decltype(pthread_cond_wait)>("pthread_cond_wait");
  if (window.armed.load()) {
    window.queued.store(condition);
    if (window.hold_next.exchange(false)) {
      // It has looked, found nothing to do, and is not asleep yet. Threads that take the mutex wait
      // for us, so this must end by itself; others have time for a lost wake-up.
      window.held.store(true);
      for (int i = 0; i < 100 && !window.woken.load(); ++i) sleep_us(1000);
    }
  }
  return next(condition, mutex);
}

extern "C" int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  static const auto next = next_definition<int(pthread_cond_t*)>("pthread_cond_broadcast");
  const int result = next(condition);
  if (window.armed.load() && closes) {
    if (condition == window.queued.load()) {
      window.woken.store(true);
    } else {
      // The last call has ended. Let the background thread look for another one now.
      window.hold_next.store(true);
      next(window.queued.load());
      while (!window.held.load()) sleep_us(100);
    }
  }
  return result;
}

namespace {

using uec::Mode;
using uec::host::Engine;

uint64_t submit(Ranks& ranks, int32_t rank, const std::vector<int32_t>& plan, uint8_t* region,
                bool background) {
  return ranks.replicate(rank, plan, ranks.addresses(rank, region), Mode::kDirect, background);
}

// Whether every other thread of this process is asleep.
bool others_are_asleep() {
  DIR* const tasks = opendir("/proc/self/task");
  CHECK(tasks != nullptr);
  bool asleep = true;
  while (const dirent* const task = readdir(tasks)) {
    if (task->d_name[0] == '.' || std::atoi(task->d_name) == gettid()) continue;
    std::string stat;
    std::getline(std::ifstream("/proc/self/task/" + std::string(task->d_name) + "/stat"), stat);
    const size_t name_end = stat.rfind(')');
    if (name_end != std::string::npos && stat[name_end + 2] != 'S') asleep = false;
  }
  closedir(tasks);
  return asleep;
}

void wait_until_others_are_asleep() {
  for (int looks = 0; looks < 3; ++looks) {
    if (!others_are_asleep()) looks = -1;
    sleep_us(500);
  }
}

// close() runs the last call itself; when that has ended, the background thread wakes for nothing,
// looks, and is kept from falling asleep while close() tells it to stop.
void check_stop_between_look_and_sleep() {
  for (int repeat = 0; repeat < 3; ++repeat) {
    window.queued.store(nullptr);
    window.held.store(false);
    window.woken.store(false);
    window.armed.store(true);
    {
      Ranks ranks(make_group(1, 1, 1), {});
      const auto regions = ranks.make_weights();
      while (window.queued.load() == nullptr) sleep_us(100);
      submit(ranks, 0, {-1}, regions[0].get(), false);
      closes = true;
      CHECK_EQ(ranks.engine(0).close(), -1);
      closes = false;
      CHECK(window.held.load() && window.woken.load());
    }
    window.armed.store(false);
  }
}

// Threads that are fully asleep, before and after a first call.
void check_stop_asleep() {
  for (const bool called : {false, true}) {
    Ranks ranks(make_group(2, 2, 1), {.segment_bytes = {300'000}, .num_workers = 4});
    const auto regions = ranks.make_weights();
    if (called)
      ranks.on_each([&](int32_t rank) {
        wait_ok(ranks.engine(rank), submit(ranks, rank, {1, 0}, regions[rank].get(), true));
      });
    wait_until_others_are_asleep();
    for (const int32_t rank : {0, 1}) CHECK_EQ(ranks.engine(rank).close(), -1);
  }
}

// Many engines that close in whatever state their threads are in, with calls in flight or none.
void check_many_engines() {
  Random random(11);
  for (int repeat = 0; repeat < scaled(200); ++repeat) {
    Ranks ranks(make_group(2, 2, 1), {.segment_bytes = {draw(random, 1, 100'000)},
                                      .tile_bytes = 4096,
                                      .num_workers = draw(random, 1, 4)});
    const auto regions = ranks.make_weights();
    const int32_t num_calls = draw(random, 0, 3), abort = draw(random, 0, 5);
    const int32_t pause[] = {draw(random, 0, 400), draw(random, 0, 400)};
    const bool background = draw(random, 0, 2) != 0;
    ranks.on_each([&](int32_t rank) {
      for (int32_t i = 0; i < num_calls; ++i)
        submit(ranks, rank, {1, 0}, regions[rank].get(), background);
      if (repeat % 2 == 0) sleep_us(pause[rank]);
      if (abort == rank) ranks.engine(rank).abort();
      ranks.engine(rank).close();
    });
  }
}

// A forked child ends what it has inherited, in whatever state that is, and its parent continues.
void check_forked_child() {
  for (int repeat = 0; repeat < 5; ++repeat) {
    Ranks ranks(make_group(2, 2, 1), {.segment_bytes = {300'000}, .num_workers = 3});
    const auto regions = ranks.make_weights();
    const uint64_t epoch = submit(ranks, 0, {1, 0}, regions[0].get(), true);
    if (repeat % 2 == 0) wait_until_others_are_asleep();
    const pid_t child = fork();
    if (child == 0) {
      ranks.engine(0).abort();
      ranks.engine(0).reject();
      CHECK_EQ(ranks.engine(0).close(), -1);
      ranks.drop_engines();
      _exit(0);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    wait_ok(ranks.engine(1), submit(ranks, 1, {1, 0}, regions[1].get(), false));
    wait_ok(ranks.engine(0), epoch);
    for (const int32_t rank : {0, 1}) CHECK_EQ(ranks.engine(rank).close(), -1);
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("close() waits for a thread that was not told to stop, or did not hear");
  check_stop_between_look_and_sleep();
  check_stop_asleep();
  check_many_engines();
#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork of several threads
  check_forked_child();
#endif
}
