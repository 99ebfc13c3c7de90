// How a call fails: what it reports, and what it publishes to peers. Which rank failed first is for
// the host to find (engine/cause.hpp).
#pragma once

#include "core/transfer/announce.hpp"

namespace uec {

// What a failed call reports.
struct Report {
  Fault fault = Fault::kNone;
  Wait wait;
  int32_t aborter = -1;  // kAborted: whose abort we saw
  int32_t root = -1;     // end of the chain of waits, by the host: engine/cause.hpp
  uint64_t epoch = 0;
  double seconds = 0;
  bool all_called = false;
};

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

// What a failed rank publishes to its peers.
UEC_HD inline AbortWord abort_word(int32_t rank, const Report& report) {
  const bool by_itself = report.fault == Fault::kCancelled || report.wait.peer == rank;
  return AbortWord::make(report.epoch, by_itself ? -1 : report.wait.peer,
                         by_itself ? -1 : report.aborter);
}

}  // namespace uec
