// How a call fails: what it reports, what it publishes to peers, and which rank failed first.
#pragma once

#include "core/transfer/announce.hpp"

namespace uec {

// What a failed call reports.
struct Report {
  Fault fault = Fault::kNone;
  Wait wait;
  int32_t aborter = -1;  // kAborted: whose abort we saw
  int32_t root = -1;     // end of the chain of waits, as far as ranks have published theirs
  uint64_t epoch = 0;
  double seconds = 0;
  bool all_called = false;
};

// What a rank last published about itself, as far as it has arrived here.
struct PeerState {
  CallRecord record;  // 0: it has made no call, or is out of reach
  AbortWord abort;
  bool gone = false;
  bool reached = true;
};

// The state of a peer: no rank publishes to itself. For one thread alone.
template <class Memory>
UEC_HD PeerState peer_state(Memory& memory, const SymmetricLayout& layout, int32_t rank) {
  return {{memory.observe(layout.call(rank))},
          {memory.observe(layout.abort(rank))},
          memory.peer_gone(rank)};
}

// Whether a peer's record for our last call differs from ours. A rank with nothing to transfer
// waits for no peer, and learns of the mismatch here: in its next call, or when it closes.
UEC_HD inline bool disagrees(CallRecord seen, CallRecord last) {
  // Its own, out of reach, or before its first call; or before ours.
  if (seen.word == 0 || last.word == 0) return false;
  const bool same_call = seen.kind() == RecordKind::kCall && seen.epoch_low() == last.epoch_low();
  return (same_call || seen.is_farewell_of(last.epoch_low())) && seen.digest() != last.digest();
}

// A peer that disagrees; -1: none so far.
template <class Memory>
UEC_HD int32_t find_disagreement(Memory& memory, const SymmetricLayout& layout, CallRecord last) {
  typename Memory::Team team;
  uint32_t first = ~0u;
  for (int32_t r = team.index(); r < layout.num_ranks; r += team.size()) {
    if (!disagrees({memory.observe(layout.call(r))}, last)) continue;
    first = static_cast<uint32_t>(r);
    break;
  }
  first = team.min_sync(first);
  return static_cast<int32_t>(first);  // ~0: -1
}

// Checked before a call announces itself: whether a peer has failed, or its last call was not ours.
// One list of all words, so that a team looks at aborts and records in one trip to memory.
template <class Memory>
UEC_HD Report check_peers(Memory& memory, const SymmetricLayout& layout, const Epoch& epoch,
                          CallRecord last) {
  typename Memory::Team team;
  const int32_t ranks = layout.num_ranks;
  uint32_t found = ~0u;
  for (int32_t i = team.index(); i < 2 * ranks; i += team.size()) {
    const bool is_record = i >= ranks;
    const uint64_t word = memory.observe(is_record ? layout.call(i - ranks) : layout.abort(i));
    if (!(is_record ? disagrees({word}, last) : AbortWord{word}.ends(epoch.number))) continue;
    found = static_cast<uint32_t>(i);
    break;
  }
  const auto first = static_cast<int32_t>(team.min_sync(found));  // -1: none
  Report report;
  if (first >= ranks) {
    report.fault = Fault::kMismatch;
    report.wait = {FlagKind::kCall, first - ranks, -1, -1, epoch.number - 1, epoch.number - 1};
  } else if (first >= 0) {
    report.fault = Fault::kAborted;
    report.aborter = first;
  }
  return report;
}

// Whether every rank that the plan needs has called; until then a peer may be busy elsewhere.
template <class Memory>
UEC_HD bool all_called(Memory& memory, const Call& call) {
  typename Memory::Team team;
  uint32_t all = 1;
  for (int32_t r = team.index(); r < call.num_ranks && all; r += team.size()) {
    if (r == call.rank || !call.work.involved[r]) continue;
    const CallRecord seen{memory.observe(call.layout.call(r))};
    if (seen.ahead_of(call.epoch.number) < 0) all = 0;
  }
  return team.min_sync(all) != 0;
}

// Finds the rank whose abort is why a step failed with `fault`, or (kNone) waits; the fault then
// becomes kAborted. -1: none.
template <class Memory>
UEC_HD int32_t find_aborter(Memory& memory, const Call& call, Fault* fault) {
  if (*fault != Fault::kNone && *fault != Fault::kGone && *fault != Fault::kAborted) return -1;
  // A peer that failed first and then ended has said why it is gone.
  const int32_t aborter = find_abort(memory, call.layout, call.epoch);
  if (aborter >= 0) *fault = Fault::kAborted;
  return aborter;
}

// The report of a step that failed with `fault`, or (kNone) is blocked.
template <class Memory>
UEC_HD Report report_step(Memory& memory, const Call& call, Fault fault, const Wait& wait) {
  Report report;
  report.aborter = find_aborter(memory, call, &fault);
  report.fault = fault;
  report.wait = wait;
  return report;
}

// What follows is for one thread alone: members of a team could see different words.

// What a failed rank publishes to its peers.
UEC_HD inline AbortWord abort_word(const Call& call, const Report& report) {
  const bool by_itself = report.fault == Fault::kCancelled || report.wait.peer == call.rank;
  return AbortWord::make(call.epoch.number, by_itself ? -1 : report.wait.peer,
                         by_itself ? -1 : report.aborter);
}

namespace detail {

// What `rank` has said of this call or an earlier one. A rank that failed later has finished this
// call, and is no reason for anything in it.
template <class Memory>
UEC_HD AbortWord abort_of(Memory& memory, const Call& call, int32_t rank) {
  const AbortWord word{memory.observe(call.layout.abort(rank))};
  return word.ahead_of(call.epoch.number) > 0 ? AbortWord{} : word;
}

// The rank whose failure made `rank` fail, directly or through others. The rank whose abort it saw
// had failed before it, so there are no cycles.
template <class Memory>
UEC_HD int32_t find_cause(Memory& memory, const Call& call, int32_t rank) {
  for (int32_t steps = 0; steps < call.num_ranks; ++steps) {
    const AbortWord word = abort_of(memory, call, rank);
    if (!word.set() || word.aborted_by() < 0) break;
    rank = word.aborted_by();
  }
  return rank;
}

}  // namespace detail

// The root cause, seen from a failed rank that has published its abort: a rank that says it failed
// by itself, else the end of the chain of waits, as far as abort words have arrived.
template <class Memory>
UEC_HD int32_t find_root(Memory& memory, const Call& call) {
  if (detail::abort_of(memory, call, call.rank).by_itself()) return call.rank;
  for (int32_t r = 0; r < call.num_ranks; ++r)
    if (detail::abort_of(memory, call, r).by_itself()) return r;
  // The first rank to give up waited for another, which may have been waiting too. What a rank was
  // waiting for when another cause ended its wait says nothing: then that other cause is followed.
  // Only where causes lead to each other are the waits all there is to go by.
  const int32_t circle = 2 * call.num_ranks;
  int32_t cause = detail::find_cause(memory, call, call.rank), at = cause;
  for (int32_t steps = 0; steps < 2 * circle; ++steps) {
    const AbortWord word = detail::abort_of(memory, call, at);
    if (!word.set()) break;
    const int32_t other = steps < circle ? detail::find_cause(memory, call, at) : cause;
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
template <class Memory>
UEC_HD bool chain_is_written(Memory& memory, const Call& call) {
  const int32_t root = find_root(memory, call);
  if (memory.peer_gone(root) || detail::abort_of(memory, call, root).by_itself()) return true;
  for (int32_t r = 0; r < call.num_ranks; ++r)
    if (call.addresses.reaches(r) && !memory.peer_gone(r) &&
        !AbortWord{memory.observe(call.layout.abort(r))}.set())
      return false;
  return true;
}

// Completes the report, once the chain is written or its time is up.
template <class Memory>
UEC_HD void name_root(Memory& memory, const Call& call, Report* report) {
  report->epoch = call.epoch.number;
  report->root = find_root(memory, call);
  if (report->fault == Fault::kAborted) {
    const CallRecord first{memory.observe(call.layout.call(report->root))};
    if (first.kind() == RecordKind::kRejected) report->fault = Fault::kRejected;
  }
}

}  // namespace uec
