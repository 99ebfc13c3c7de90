// Check mode: after each transfer, every rank compares its slots with what their homes had.
//
// Before a home announces a call, it copies the experts that the plan replicates, with a checksum
// of each block, into its check region, which peers can read. When a rank has all that it is owed,
// it computes the checksums of its slots, and compares with the home's copy where one differs. Then
// it publishes `checked` to the home, whose call ends only when all its readers have done so: a
// copy does not change while it is read, and the next call may overwrite it.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/transfer/announce.hpp"
#include "engine/config.hpp"
#include "host/policies.hpp"

namespace uec::host {

// A byte that is not what it should be.
struct Damage {
  enum Kind : int32_t {
    kNone,
    kSlot,       // a filled slot differs from its home
    kUntouched,  // a slot, or a segment of one, that the call had nothing for was written to
    kSource,     // this rank's main weights changed while the call ran
    kResident,   // a slot that kept its expert differs from the home's
  } kind = kNone;
  int32_t home = -1;
  int32_t expert = -1;
  int32_t slot = -1;
  int32_t segment = -1;
  int64_t offset = -1;  // in the segment of the expert
  int32_t found = 0;
  int32_t expected = 0;
  bool source_changed = false;  // the home says so: of kSlot, then no fault of the transfer
};

// What a transfer moves, as arrays of the prepared call.
struct CheckedCall {
  uint64_t epoch = 0;
  const int32_t* slot_expert = nullptr;            // [G][S]
  const int32_t* resident = nullptr;               // [G][S] what slots held before; null: nothing
  const int64_t* slot_offset = nullptr;            // [segments] of the bank's slots
  const uint8_t* const* main_ptrs = nullptr;       // [segments][M]
  const std::vector<uint8_t>* selected = nullptr;  // [segments] whether it is transferred

  bool keeps(int32_t at) const { return resident != nullptr && resident[at] == slot_expert[at]; }
};

class SlotCheck {
 public:
  // Borrows both.
  SlotCheck(const EngineConfig& config, const EngineLayout& layout);

  // Called before the call is announced, on the thread that announces it.
  void remember(const CheckedCall& call);
  // After all that peers owe has arrived. The first difference, by segment and block; kNone: none.
  Damage find_changed_main(const CheckedCall& call) const;
  Damage find_damaged_slot(const CheckedCall& call) const;

  // Publishes to this rank's readers whether its main weights stayed as they were. Pairs with
  // has_verdict().
  void publish_verdict(const CheckedCall& call, bool changed) const;
  bool has_verdict(const CheckedCall& call, int32_t home, bool* changed) const;

  // Publishes to the homes of this rank's slots that it has read their copies. Pairs with
  // AwaitChecks.
  void publish_checked(const CheckedCall& call) const;

 private:
  friend class AwaitChecks;
  friend class AwaitCopies;

  uint8_t* copy(int32_t rank, size_t segment, int32_t local_idx) const;
  uint64_t* sums(int32_t rank, size_t segment, int32_t local_idx) const;
  uint8_t* slot(const CheckedCall& call, size_t segment, int32_t slot) const;
  std::atomic_ref<uint64_t> checked(int32_t rank, int32_t local_idx, int32_t reader) const;
  std::atomic_ref<uint64_t> verdict(int32_t rank, int32_t home) const;
  void ring(int32_t rank) const;
  int32_t num_segments() const { return static_cast<int32_t>(config_.segment_bytes.size()); }
  // visit(expert, rank, slot) for each filled slot of the plan.
  template <class Visit>
  void each_replica(const CheckedCall& call, Visit&& visit) const;
  // Compares a copy of a segment, with its checksums, to bytes that should be the same.
  Damage compare(const uint8_t* bytes, int32_t rank, size_t segment, int32_t local_idx) const;

  const EngineConfig& config_;
  const EngineLayout& layout_;
  std::vector<uint8_t> untouched_;  // what slots held that the call has nothing for
};

// What a rank waits for before it compares the slots of a bank: their homes' copies. No part of the
// transfer vouches for those of slots that kept their expert, or got it from another slot.
class AwaitCopies {
 public:
  AwaitCopies(const SlotCheck& check, const CheckedCall& checked, const Call& call,
              const HostMemory& memory);

  Step step();
  Fault fault() const { return fault_; }
  Wait wait() const { return wait_; }

 private:
  const Call& call_;
  const HostMemory& memory_;
  std::vector<std::pair<int32_t, int32_t>> homes_;  // and an expert
  size_t next_ = 0;
  Fault fault_ = Fault::kNone;
  Wait wait_;
};

// What a home waits for at the end of a call, as Finish does for everything else.
class AwaitChecks {
 public:
  AwaitChecks(const SlotCheck& check, const CheckedCall& checked, const Call& call,
              const HostMemory& memory);

  Step step();
  Fault fault() const { return fault_; }
  Wait wait() const { return wait_; }

 private:
  struct Owed {
    int32_t reader, expert, local_idx;
  };

  // For core/transfer/protocol.hpp's checks of flags: those of the check region have negative
  // offsets.
  struct Memory {
    uint64_t observe(int64_t offset) const;
    bool peer_gone(int32_t rank) const { return memory.peer_gone(rank); }
    const AwaitChecks& of;
    const HostMemory& memory;
  };

  const SlotCheck& check_;
  const Call& call_;
  const HostMemory& memory_;
  std::vector<Owed> owed_;
  size_t next_ = 0;
  Fault fault_ = Fault::kNone;
  Wait wait_;
};

}  // namespace uec::host
