// Why a call failed: the chain of who waited for whom, which a rank's host follows through what all
// ranks have published.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "core/transfer/failure.hpp"

namespace uec {

// What a rank last published about itself, as far as it has arrived here.
struct PeerState {
  CallRecord record;  // 0: it has made no call, or is out of reach
  AbortWord abort;
  bool gone = false;  // its process has ended
  bool reached = true;
};
using PeerStates = std::vector<PeerState>;  // [G]

namespace detail {

// What `rank` has said of this call or an earlier one. A rank that failed later has finished this
// call, and is no reason for anything in it.
inline AbortWord abort_of(const PeerStates& states, uint64_t epoch, int32_t rank) {
  const AbortWord word = states[rank].abort;
  return word.ahead_of(epoch) > 0 ? AbortWord{} : word;
}

// The rank whose failure made `rank` fail, directly or through others. The rank whose abort it saw
// had failed before it, so there are no cycles.
inline int32_t find_cause(const PeerStates& states, uint64_t epoch, int32_t rank) {
  for (size_t steps = 0; steps < states.size(); ++steps) {
    const AbortWord word = abort_of(states, epoch, rank);
    if (!word.set() || word.aborted_by() < 0) break;
    rank = word.aborted_by();
  }
  return rank;
}

}  // namespace detail

// The root cause, seen from a failed rank that has published its abort: a rank that says it failed
// by itself, else the end of the chain of waits, as far as abort words have arrived.
inline int32_t find_root(const PeerStates& states, uint64_t epoch, int32_t rank) {
  const auto num_ranks = static_cast<int32_t>(states.size());
  if (detail::abort_of(states, epoch, rank).by_itself()) return rank;
  for (int32_t r = 0; r < num_ranks; ++r)
    if (detail::abort_of(states, epoch, r).by_itself()) return r;
  // The first rank to give up waited for another, which may have been waiting too. What a rank was
  // waiting for when another cause ended its wait says nothing: then that other cause is followed.
  // Only where causes lead to each other are the waits all there is to go by.
  const int32_t circle = 2 * num_ranks;
  int32_t cause = detail::find_cause(states, epoch, rank), at = cause;
  for (int32_t steps = 0; steps < 2 * circle; ++steps) {
    const AbortWord word = detail::abort_of(states, epoch, at);
    if (!word.set()) break;
    const int32_t other = steps < circle ? detail::find_cause(states, epoch, at) : cause;
    if (other != cause) {
      cause = at = other;
      continue;
    }
    if (word.waited_for() < 0) break;
    at = word.waited_for();
  }
  return at;
}

// Whether the root is final: some rank says that it failed by itself, or every live rank has
// published its word.
inline bool chain_is_written(const PeerStates& states, uint64_t epoch, int32_t rank) {
  const int32_t root = find_root(states, epoch, rank);
  if (states[root].gone || detail::abort_of(states, epoch, root).by_itself()) return true;
  for (const PeerState& state : states)
    if (state.reached && !state.gone && !state.abort.set()) return false;
  return true;
}

// Completes the report of `rank`.
inline void name_root(const PeerStates& states, int32_t rank, Report* report) {
  report->root = find_root(states, report->epoch, rank);
  if (report->fault == Fault::kAborted &&
      states[report->root].record.kind() == RecordKind::kRejected)
    report->fault = Fault::kRejected;
}

// Completes the report of `rank`, which has published its abort, by what `read()` finds in its
// memory; returns the last of it. Abort words of different ranks arrive in any order, so the chain
// is given time to be written. Peers answer an abort with their own; a rank that is stuck does not,
// and ends the chain.
template <class Read>
PeerStates await_root(int32_t rank, Report* report, Read&& read) {
  using std::chrono::milliseconds, std::chrono::steady_clock;
  const milliseconds grace(report->fault == Fault::kTimeout   ? 500
                           : report->fault == Fault::kAborted ? 50
                                                              : 0);
  const auto end = steady_clock::now() + grace;
  PeerStates states = read();
  while (!chain_is_written(states, report->epoch, rank) && steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
    states = read();
  }
  name_root(states, rank, report);
  return states;
}

}  // namespace uec
