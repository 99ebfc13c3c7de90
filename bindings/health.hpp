// How a call failed, and what each rank is doing, as Python reads it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/cause.hpp"
#include "engine/health.hpp"
#include "host/slot_check.hpp"

namespace uec::python {

// What a rank last published about itself, with epochs extended to 64 bits.
struct PeerState {
  RecordKind kind = RecordKind::kCall;
  uint64_t epoch = 0;         // 0: none
  uint64_t failed_epoch = 0;  // that it has reported a failure of; 0: none
  int32_t waited_for = -1;    // in that call
  int32_t aborted_by = -1;    // the rank whose failure it was told of
  bool gone = false;          // its process has ended
  bool reachable = true;
};

inline PeerState peer_state(const uec::PeerState& words, uint64_t now) {
  const CallRecord record = words.record;
  const AbortWord abort = words.abort;
  return {.kind = record.kind(),
          .epoch = record.word == 0 ? 0 : now + record.ahead_of(now),
          .failed_epoch = abort.set() ? now + abort.ahead_of(now) : 0,
          .waited_for = abort.waited_for(),
          .aborted_by = abort.aborted_by(),
          .gone = words.gone,
          .reachable = words.reached};
}

// By rank, at about call `now`; none: nothing is known.
inline std::optional<std::vector<PeerState>> peer_states(const PeerStates& states, uint64_t now) {
  if (states.empty()) return std::nullopt;
  std::vector<PeerState> peers;
  for (const uec::PeerState& words : states) peers.push_back(peer_state(words, now));
  return peers;
}

// A failed call, and what else the engine knows of it.
struct FullReport : Report {
  std::string detail;                                 // of a backend
  std::optional<std::pair<int64_t, int64_t>> bad_id;  // position and value; see Engine::bad_id
  host::Damage damage;                                // of check mode
  std::optional<std::vector<PeerState>> peers;        // by rank; none: not known
};

// What an engine has done so far, as far as the host knows it.
struct EngineHealth {
  CallCounts calls;
  std::optional<uint64_t> completed;    // calls
  std::optional<int64_t> bytes_stored;  // by these
  std::optional<Waits> waits;
};

}  // namespace uec::python
