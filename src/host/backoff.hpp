// How a blocked rank waits: spin briefly, then give up the core, then sleep on its doorbell.
#pragma once

#include <sched.h>

#include <chrono>

#include "host/doorbell.hpp"

namespace uec::host {

class Backoff {
 public:
  explicit Backoff(Doorbell doorbell) : doorbell_(doorbell) {}
  ~Backoff() { reset(); }
  Backoff(const Backoff&) = delete;
  Backoff& operator=(const Backoff&) = delete;

  // Called between two polls that found nothing. Returns true now and then: time to check the
  // clocks.
  bool pause() {
    if (polls_ < kSpins) {
      ++polls_;
      relax();
      return false;
    }
    if (polls_ < kSpins + kYields) {
      ++polls_;
      sched_yield();
      return false;
    }
    if (!listening_) {
      if (polls_ == kSpins + kYields) {
        ++polls_;
        began_ = std::chrono::steady_clock::now();
      }
      heard_ = doorbell_.listen();
      listening_ = true;
      return false;  // the flags are looked at once more before sleeping
    }
    doorbell_.sleep(heard_, kSleepNanoseconds);
    doorbell_.leave();
    listening_ = false;
    return true;
  }

  // When this wait stopped spinning. Valid once pause() has returned true.
  std::chrono::steady_clock::time_point began() const { return began_; }

  // Something moved.
  void reset() {
    polls_ = 0;
    if (!listening_) return;
    doorbell_.leave();
    listening_ = false;
  }

 private:
  // A missed sign of life (a peer's death, the clock) is noticed after one sleep.
  static constexpr int64_t kSleepNanoseconds = 5'000'000;
  static constexpr int kSpins = 200;
  static constexpr int kYields = 20;

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  Doorbell doorbell_;
  std::chrono::steady_clock::time_point began_;
  uint32_t heard_ = 0;
  int polls_ = 0;
  bool listening_ = false;
};

}  // namespace uec::host
