// What an engine has done and waited for. Its threads count, and monitoring threads read at any
// time without stopping them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "core/transfer/prepare.hpp"
#include "core/transfer/protocol.hpp"

namespace uec {

// Calls that took an epoch.
struct CallCounts {
  int64_t replicate = 0;
  int64_t reduce = 0;
  int64_t gather = 0;
  int64_t rejected = 0;
};

class CallCounter {
 public:
  void add(Operation operation) { add_to(counts_[static_cast<uint64_t>(operation)]); }
  void add_rejected() { add_to(counts_[0]); }
  CallCounts read() const {
    return {of(Operation::kReplicate), of(Operation::kReduce), of(Operation::kGather),
            counts_[0].load(std::memory_order_relaxed)};
  }

 private:
  static void add_to(std::atomic<int64_t>& count) { count.fetch_add(1, std::memory_order_relaxed); }
  int64_t of(Operation operation) const {
    return counts_[static_cast<uint64_t>(operation)].load(std::memory_order_relaxed);
  }

  std::array<std::atomic<int64_t>, 4> counts_{};  // by Operation, whose numbers begin at 1
};

// Waits that were long enough to sleep; a wait that ends while the worker still spins does not
// count. A wait in progress counts with its length so far.
struct Waits {
  static constexpr size_t kLimits = 4;
  static constexpr std::array<std::chrono::milliseconds, kLimits> kLimit{
      std::chrono::milliseconds(1), std::chrono::milliseconds(10), std::chrono::milliseconds(100),
      std::chrono::milliseconds(1000)};

  std::array<int64_t, kLimits> longer{};  // waits that took longer than each limit
  std::chrono::nanoseconds total{};       // of all workers together
  std::chrono::nanoseconds longest{};
  Wait longest_for;  // what the longest one was for; `expected` is its epoch
};

class WaitLog {
 public:
  Waits read() const {
    Waits waits;
    for (size_t i = 0; i < Waits::kLimits; ++i)
      waits.longer[i] = longer_[i].load(std::memory_order_relaxed);
    waits.total = std::chrono::nanoseconds(total_.load(std::memory_order_relaxed));
    const std::lock_guard lock(mutex_);
    waits.longest = std::chrono::nanoseconds(longest_.load(std::memory_order_relaxed));
    waits.longest_for = longest_for_;
    return waits;
  }

 private:
  friend class WaitMeter;

  std::array<std::atomic<int64_t>, Waits::kLimits> longer_{};
  std::atomic<int64_t> total_{0}, longest_{0};
  mutable std::mutex mutex_;  // what belongs to the longest wait, together
  Wait longest_for_;
};

// One worker's waits, one after another.
class WaitMeter {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WaitMeter(WaitLog& log) : log_(log) {}

  void begin(Clock::time_point since) {
    since_ = since;
    counted_ = {};
    limits_ = 0;
  }

  // Accounts for the wait up to `now`; `wait` says what it is for.
  void count(Clock::time_point now, const Wait& wait) {
    const std::chrono::nanoseconds length = now - since_;
    log_.total_.fetch_add((length - counted_).count(), std::memory_order_relaxed);
    counted_ = length;
    for (; limits_ < Waits::kLimits && length > Waits::kLimit[limits_]; ++limits_)
      log_.longer_[limits_].fetch_add(1, std::memory_order_relaxed);
    if (length.count() <= log_.longest_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(log_.mutex_);
    if (length.count() <= log_.longest_.load(std::memory_order_relaxed)) return;
    log_.longest_.store(length.count(), std::memory_order_relaxed);
    log_.longest_for_ = wait;
  }

 private:
  WaitLog& log_;
  Clock::time_point since_;
  std::chrono::nanoseconds counted_{};  // of this wait, in the log's total
  size_t limits_ = 0;                   // that this wait has passed
};

}  // namespace uec
