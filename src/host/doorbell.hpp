// A rank's doorbell: a futex word in its symmetric memory that every publish to it rings.
//
// There may be more ranks than cores, so a blocked rank has to yield its core, and a publish has
// to wake it. No wake-up is lost: a sleeper reads the sequence, then looks at its flags, then
// sleeps only if the sequence has not moved; a ringer stores the flag before it moves the sequence.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace uec::host {

class Doorbell {
 public:
  explicit Doorbell(uint8_t* at) : words_(reinterpret_cast<uint32_t*>(at)) {}

  void ring() const {
    // Sequentially consistent, as is listen(): either the ringer sees the sleeper, or the sleeper
    // sees the moved sequence.
    sequence().fetch_add(1, std::memory_order_seq_cst);
    if (sleepers().load(std::memory_order_seq_cst) != 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
  }

  // Announces a sleeper. Look at the flags once more after this, then sleep() or leave().
  uint32_t listen() const {
    sleepers().fetch_add(1, std::memory_order_seq_cst);
    return sequence().load(std::memory_order_seq_cst);
  }
  void leave() const { sleepers().fetch_sub(1, std::memory_order_relaxed); }

  // Returns after a ring since `heard`, after `nanoseconds`, or spuriously.
  void sleep(uint32_t heard, int64_t nanoseconds) const {
    const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    futex(FUTEX_WAIT, heard, &limit);
  }

 private:
  std::atomic_ref<uint32_t> sequence() const { return std::atomic_ref(words_[0]); }
  std::atomic_ref<uint32_t> sleepers() const { return std::atomic_ref(words_[1]); }
  void futex(int operation, uint32_t value, const timespec* limit) const {
    syscall(SYS_futex, words_, operation, value, limit, nullptr, 0);
  }

  uint32_t* words_;
};

}  // namespace uec::host
