// Scopes without the GIL, which finalization can wait for.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <optional>

namespace uec::python {

// A thread that requests the GIL after finalization has begun never gets it: Python unwinds the
// thread, which a destructor turns into std::terminate (from 3.14 on the thread hangs). So all such
// threads have to return before finalization, and none may release the GIL afterwards.
class Unlocked {
 public:
  Unlocked() {
    if (ending_) return;
    num_outside_ += 1;
    release_.emplace();
  }
  ~Unlocked() {
    if (!release_) return;
    release_.reset();  // reacquires the GIL
    num_outside_ -= 1;
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  static int num_outside() { return num_outside_.load(); }
  static void forget_others() { num_outside_ = 0; }  // in a forked child
  // Needs the GIL. From now on no thread releases it, so no call may wait for another thread.
  static void end() { ending_ = true; }

 private:
  static inline std::atomic<int> num_outside_{0};
  static inline bool ending_ = false;  // guarded by the GIL

  std::optional<nanobind::gil_scoped_release> release_;
};

}  // namespace uec::python
