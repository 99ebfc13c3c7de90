// Ends a test that hangs, and prints what it was waiting for.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "support/check.hpp"

class Watchdog {
 public:
  // Waits in poll() rather than on a condition variable or futex: those are what is tested.
  explicit Watchdog(const char* hang) {
    CHECK(pipe(ends_) == 0);
    const char* const named = std::getenv("UEC_WATCHDOG_SECONDS");
    const int seconds = named ? std::atoi(named) : 100;  // far beyond what a busy machine needs
    thread_ = std::thread([this, hang, seconds] {
      pollfd end{ends_[0], POLLIN, 0};
      if (poll(&end, 1, seconds * 1000) != 0) return;
      std::fprintf(stderr, "watchdog: %s\n", hang);
      _exit(1);  // the other threads cannot end
    });
  }
  ~Watchdog() {
    close(ends_[1]);
    thread_.join();
    close(ends_[0]);
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  int ends_[2];
  std::thread thread_;
};
