// Bounded waits of a warp, and how a rank's blocks fail together.
#pragma once

#include "core/base/bounds.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/failure.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/memory.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/slot_words.cuh"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

// Nanoseconds from then to now. The clock may be set back.
UEC_DEVICE uint64_t elapsed(uint64_t from, uint64_t now) { return now > from ? now - from : 0; }

// Whether another block, or the other warp, has failed.
UEC_DEVICE bool has_failed(BlockCall& block) {
  int32_t failed = 0;
  if (Warp::leader()) {
    failed = ptx::load_relaxed(&block.state->failed);
    if (failed) ptx::store_shared_relaxed(&block.stop, 1);
  }
  return Warp::broadcast(failed) != 0;
}

UEC_DEVICE bool is_cancelled(const Status* status) {
  return Warp::broadcast(Warp::leader() && ptx::load_acquire_system(&status->cancelled) != 0);
}
UEC_DEVICE bool is_cancelled(const BlockCall& block) { return is_cancelled(block.state->status); }

// The first failure of a rank keeps its report and notifies its peers at once; other blocks stop at
// their next poll. Called by a whole warp. `waited_ns`: for a wait that has expired.
template <class Memory>
UEC_DEVICE void fail(BlockCall& block, Memory& memory, Fault fault, int32_t aborter,
                     const Wait& wait, uint64_t waited_ns = 0, bool all_called = false) {
  Report& report = block.state->report;
  bool first = false;
  if (Warp::leader()) {
    first = ptx::compare_swap_relaxed(&block.state->failed, 0, 1) == 0;
    ptx::store_shared_relaxed(&block.stop, 1);
    if (first) {  // for the last block to leave, which comes after this one
      report.fault = fault;
      report.wait = wait;
      report.aborter = aborter;
      report.epoch = block.call.epoch.number;
      report.seconds = static_cast<double>(waited_ns) * 1e-9;
      report.all_called = all_called;
    }
  }
  if (!Warp::broadcast(first)) return;
  FlagPublisher publisher;
  announce_abort(block.call, memory, publisher, abort_word(block.call.rank, report));
  while (!memory.flags_delivered()) {
  }
}

// Rejects bad input on this rank. Takes an epoch, as every call does; `wait` says what is wrong. By
// a whole warp.
template <class Memory>
UEC_DEVICE void reject(BlockCall& block, Memory& memory, const Wait& wait) {
  const CallRecord record =
      CallRecord::make(block.call.epoch.number, block.state->digest, RecordKind::kRejected);
  FlagPublisher publisher;
  announce_absence(block.call, memory, publisher, record.word);
  fail(block, memory, Fault::kRejected, -1, wait);
}

// Checks before a worker's first step that no peer has aborted the call: a late rank would
// otherwise work on memory that its owners use again.
template <class Memory>
UEC_DEVICE bool may_begin(BlockCall& block, Memory& memory) {
  Fault fault = Fault::kNone;
  const int32_t aborter = find_aborter(memory, block.call, &fault);
  if (fault != Fault::kNone) fail(block, memory, fault, aborter, Wait{});
  return fault == Fault::kNone;
}

// Nanoseconds that the current wait has lasted, once that is too long; else 0.
template <class Memory>
UEC_DEVICE uint64_t expired(BlockCall& block, Clock& clock, Memory& memory) {
  const bool all = Warp::broadcast(clock.called) != 0 || all_called(memory, block.call);
  uint64_t waited = 0;
  if (Warp::leader()) {
    const uint64_t now = ptx::nanoseconds();
    if (!clock.waiting) clock.since = now;
    if (all && !clock.called) clock.called_since = now;
    clock.waiting = 1;
    clock.called |= all;
    const uint64_t limit = clock.called ? block.state->wait_limit_ns : block.state->call_limit_ns;
    waited = elapsed(max64(clock.since, clock.called ? clock.called_since : 0), now);
    if (limit == 0 || waited <= limit) waited = 0;
  }
  return Warp::broadcast(waited);
}

// Runs steps to their end. Every wait is bounded: by an abort, a cancellation, or the warp's clock.
template <class Steps, class Memory>
UEC_DEVICE bool drive(Steps& steps, BlockCall& block, Clock& clock, Memory& memory) {
  if (Warp::leader()) {
    clock.since = clock.called_since = 0;
    clock.waiting = clock.called = 0;
  }
  Fault fault = Fault::kNone;
  int32_t aborter = -1;
  uint64_t waited = 0;
  for (uint32_t i = 1; fault == Fault::kNone; ++i) {
    const Step step = steps.step();
    if (step == Step::kFinished) return true;
    if (step == Step::kFailed) {
      fault = steps.fault();
      aborter = find_aborter(memory, block.call, &fault);
      break;
    }
    if (step != Step::kWaitsForPeer && Warp::leader()) clock.waiting = 0;
    if (step != Step::kProgress) ptx::pause();
    if (i % kStepsPerPoll != 0) continue;
    if (has_failed(block)) return false;
    if (step != Step::kWaitsForPeer) continue;
    aborter = find_aborter(memory, block.call, &fault);
    if (i % kStepsPerLongPoll == 0 && is_cancelled(block)) fault = Fault::kCancelled;
    waited = expired(block, clock, memory);
    if (fault == Fault::kNone && waited != 0) fault = Fault::kTimeout;
  }
  const bool all_called = Warp::broadcast(clock.called) != 0;
  fail(block, memory, fault, aborter, steps.wait(), waited, all_called);
  return false;
}

// Ends the first failed call of a rank: by one thread, after all the rank's blocks have drained, so
// that the caller may change what they were reading.
UEC_DEVICE void publish_failure(RankState& state) {
  state.failure_published = 1;
  release_slots(state);
  Status* const status = state.status;
  status->report = state.report;
  // The host sees the report once it sees the epoch.
  ptx::store_release_system(&status->failed_call, state.last_call + 1);
}

}  // namespace uec::cuda
