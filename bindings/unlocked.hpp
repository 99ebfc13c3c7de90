// Work without the interpreter lock, which whoever ends the interpreter can wait for.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <optional>

namespace uec::python {

// A thread that asks for the lock when the interpreter has begun to end never gets it: Python
// unwinds it by force, which a destructor turns into std::terminate (from 3.14 on it hangs). So all
// such threads have to be back before that, and none may leave any more.
class Unlocked {
 public:
  Unlocked() {
    if (ending_) return;
    num_outside_ += 1;
    release_.emplace();
  }
  ~Unlocked() {
    if (!release_) return;
    release_.reset();  // the lock is back
    num_outside_ -= 1;
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  static int num_outside() { return num_outside_.load(); }
  static void forget_others() { num_outside_ = 0; }  // in a forked child
  // With the lock: from now on nobody gives it away. No call may be left that waits for another.
  static void end() { ending_ = true; }

 private:
  static inline std::atomic<int> num_outside_{0};
  static inline bool ending_ = false;  // under the interpreter lock

  std::optional<nanobind::gil_scoped_release> release_;
};

}  // namespace uec::python
