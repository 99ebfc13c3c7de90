// One rank's calls on the c10d engine, as far as no process group is needed: their numbers and
// digests, what banks hold, and which chunks this rank sends and receives in which round.
#pragma once

#include <cstdint>
#include <vector>

#include "c10d/rounds.hpp"
#include "core/plan/check.hpp"
#include "core/transfer/prepare.hpp"
#include "engine/banks.hpp"
#include "engine/config.hpp"

namespace uec::c10d {

enum class StepKind : int32_t {
  kSendMain = 0,  // of an expert's main weights
  kSendSlot = 1,  // of what a slot holds: a resident, or what arrived earlier in this call
  kReceive = 2,   // into a slot
  kSendGrad = 3,  // of a slot's gradient
  kKeepGrad = 4,  // of a slot of the rank that sums: part of the sum, and goes nowhere
  kAddGrad = 5,   // of a replica's gradient, to be summed here
  kSendSum = 6,   // to the home
  kAddSum = 7,    // from a hub, to be added to the main gradient
};

// A part of a chunk that lies in one segment.
struct Step {
  int64_t round;
  StepKind kind;
  int64_t peer;
  int64_t tag;      // the same at both ends, and no other's in this call
  int64_t segment;  // of the group; of a reduction, among those with gradients
  int64_t offset;   // bytes from the start of the expert's segment, in a slot's dtype
  int64_t bytes;    // in a slot's dtype
  int64_t place;    // the slot; or the main's index, where a main is read or added to; -1: neither
  int64_t expert;
  int64_t chunk;    // index in its entry of the schedule
  int64_t gate;     // the sum that it is part of; -1: none
  int64_t behind;   // the round by which has arrived what it sends on; -1: it was there
  int64_t replica;  // whose part of the sum, in the order of adding
};

struct Prepared {
  uint64_t epoch;
  uint64_t digest;
  Mode mode;
  bool is_empty;            // no rank moves anything
  std::vector<Step> steps;  // of this rank, by round
};

// Needs external synchronisation.
class Ledger {
 public:
  explicit Ledger(EngineConfig config);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  const Topology& topology() const { return topology_; }
  PlanCheck check(const int32_t* slot_expert) const {
    return check_plan(SingleThread{}, topology_, slot_expert);
  }

  // Each takes the next number, and chains its digest: ranks that differed once differ from then
  // on.
  Prepared replicate(ReplicateArgs args);
  Prepared reduce(const ReduceArgs& args);
  Prepared gather();
  // A call that this rank rejects has a number, and no digest of its own.
  uint64_t reject() { return ++epoch_; }

  Banks& banks() { return banks_; }
  uint64_t epoch() const { return epoch_; }
  // [G][S] the slots that the last call writes to or, of a reduction, reads.
  const std::vector<uint8_t>& slots_to_fill() const { return slots_to_fill_; }

 private:
  int32_t chunk_groups(bool relays) const;
  void list_steps(Rounds& rounds, bool is_reduction, Prepared* prepared) const;
  Prepared enter(uint64_t digest);

  EngineConfig config_;
  EngineLayout layout_;
  Topology topology_;
  GroupTables tables_;
  Banks banks_;
  std::vector<uint64_t> memory_;
  CallArrays arrays_;
  ScheduleArrays work_;
  Call call_;
  PlanShape shape_;
  uint64_t epoch_ = 0;
  uint64_t digest_;
  std::vector<uint8_t> slots_to_fill_;
};

}  // namespace uec::c10d
