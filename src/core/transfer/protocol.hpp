// The words that ranks exchange, what they promise, and the two policies that carry them.
//
// A publish is a release store of one 64-bit flag into a peer's symmetric memory; an observe is an
// acquire load of a flag in one's own. Flags carry the epoch and are compared with ==, so a flag of
// an earlier call never satisfies a later wait, and nothing has to be cleared between calls.
//
//   flag      written by            means, at epoch k                      pairs with
//   call      every rank            I am in call k, and this is my digest  check_call, check_flag
//   open      slot or main owner    my earlier work is done; write, read   WorkQueue::check_open
//   ready     source (push)         this group is in your slot             TransferPieces::ready
//   done      sender                all I had for your slot is in it       Finish::step
//   pulled    hub (pull)            I have read your weights               Finish::step
//   gathered  every rank            my row of loads is in your table       Gather::step
//   summed    hub (reduction)       this group is added up in my slot      ReductionPieces::ready
//   consumed  reader of a slot      I have read your slot's gradient       ReductionPieces::ready,
//                                                                          Finish::step
//   abort     a failing rank        do not wait for me; I waited for ...   find_abort
#pragma once

#include "core/base/common.hpp"

namespace uec {

// ---- call record: one word, so that it is read whole ----------------------------------------

enum class RecordKind : uint32_t { kCall = 0, kRejected = 1, kClosed = 2 };

// epoch modulo 2^32 | 30 bits of the chained digest | kind. Ranks are never 2^31 calls apart, so a
// signed difference orders epochs.
struct CallRecord {
  uint64_t word = 0;

  UEC_HD static CallRecord make(uint64_t epoch, uint64_t digest, RecordKind kind) {
    return {epoch << 32 | (digest >> 34) << 2 | static_cast<uint64_t>(kind)};
  }
  // What a rank leaves when it closes its group.
  UEC_HD static CallRecord farewell(uint64_t last_epoch, CallRecord last) {
    return make(last_epoch + 1, static_cast<uint64_t>(last.digest()) << 34, RecordKind::kClosed);
  }
  UEC_HD uint32_t epoch_low() const { return static_cast<uint32_t>(word >> 32); }
  UEC_HD uint32_t digest() const { return static_cast<uint32_t>(word) >> 2; }
  UEC_HD RecordKind kind() const { return static_cast<RecordKind>(word & 3); }
  // A farewell is numbered one beyond the rank's last call, and repeats that call's digest.
  UEC_HD bool is_farewell_of(uint32_t last) const {
    return kind() == RecordKind::kClosed && epoch_low() == last + 1;
  }
  // Epochs that the record is ahead of `epoch`; negative: behind.
  UEC_HD int32_t ahead_of(uint64_t epoch) const {
    return static_cast<int32_t>(epoch_low() - static_cast<uint32_t>(epoch));
  }
};

// ---- abort word ------------------------------------------------------------------------------

// epoch modulo 2^32 | set | the rank it was waiting for | the rank whose abort ended it. Both,
// because either alone misleads: the wait may be one that would have ended well, and the first rank
// to give up may have waited for one that was waiting too. Groups have fewer than 2^15 - 1 ranks.
struct AbortWord {
  uint64_t word = 0;

  UEC_HD static AbortWord make(uint64_t epoch, int32_t waited_for, int32_t aborted_by) {
    return {epoch << 32 | 1u << 31 | static_cast<uint32_t>(waited_for + 1) << 15 |
            static_cast<uint32_t>(aborted_by + 1)};
  }
  UEC_HD bool set() const { return word >> 31 & 1; }
  UEC_HD int32_t ahead_of(uint64_t epoch) const {
    return static_cast<int32_t>(static_cast<uint32_t>(word >> 32) - static_cast<uint32_t>(epoch));
  }
  // -1: no rank.
  UEC_HD int32_t waited_for() const { return static_cast<int32_t>(word >> 15 & 0x7FFF) - 1; }
  UEC_HD int32_t aborted_by() const { return static_cast<int32_t>(word & 0x7FFF) - 1; }
  // Whether it ends the call of this epoch: who failed in a later one has finished this one, and
  // owes nothing here any more.
  UEC_HD bool ends(uint64_t epoch) const { return set() && ahead_of(epoch) <= 0; }
  UEC_HD bool by_itself() const { return set() && waited_for() < 0 && aborted_by() < 0; }
};

// ---- what a wait can end with ------------------------------------------------------------------

enum class Fault : int32_t {
  kNone = 0,
  kMismatch,   // a peer made another call at this epoch
  kRejected,   // a peer's own input was bad: it will not take part
  kClosed,     // a peer closed its group while it still owed something
  kGone,       // a peer's process ended
  kAborted,    // a peer failed and said so
  kTimeout,    // a bounded wait expired
  kCancelled,  // Group.abort() on this rank
  kDamaged,    // check mode: a slot, or a main weight, is not what it should be
};

enum class FlagKind : int32_t {
  kCall,
  kOpen,
  kReady,
  kDone,
  kPulled,
  kGathered,
  kSummed,
  kConsumed,
  kChecked  // host engine, check mode: a reader of this rank's copies has compared its slots
};

// One wait: what the report of a failure says.
struct Wait {
  FlagKind flag = FlagKind::kCall;
  int32_t peer = -1;
  int32_t expert = -1;
  int32_t piece = -1;
  uint64_t seen = 0;
  uint64_t expected = 0;
};

// ---- policies --------------------------------------------------------------------------------

// Proof that this thread's stores are visible at their destinations. Only a Mover can make one, so
// a flag cannot be published ahead of what it vouches for.
class Delivered {
 private:
  friend class DeliveryPolicy;
  UEC_HD Delivered() {}
};

// As Delivered, and this thread has released once for several words, which may be stored relaxed.
class Released {
 private:
  friend class DeliveryPolicy;
  UEC_HD Released() {}
};

// Base class of every Mover.
class DeliveryPolicy {
 public:
  static constexpr bool kFar = false;  // some peers are reached by store_far() only

 protected:
  UEC_HD static Delivered delivered() { return Delivered(); }
  UEC_HD static Released released() { return Released(); }
};

// A Memory provides, for this rank, to each member of its `Team` (core/base/team.hpp):
//   uint64_t observe(int64_t offset)        acquire load of a flag in this rank's memory
//   void publish(Delivered, int32_t rank, int64_t offset, uint64_t value)
//                                           release store into `rank`'s memory, and wakes it
//   void publish(Released, ...)             the same, where a Mover of this Memory gives such a
//                                           token
//   bool flags_delivered()                  whether all that this thread has published is in the
//                                           memory it went to
//   bool peer_gone(int32_t rank)            its process ended (false where that cannot be known)
//   bool should_diagnose()                  optional: whether to look, this time, for a reason why
//                                           a flag has not arrived
//   void acquire_from(rank, offset, seen)   optional: a flag that `rank` writes shows what was
//                                           waited for; an observe alone does not order what came
//                                           before it there
// and for counters in this rank's private memory, shared by its workers:
//   int32_t arrive(Delivered, int32_t*, n)  adds n, acquire-release; returns what there is then
//
// A Mover moves bytes for one worker, in order, through a ring of stages (core/transfer/ring.hpp).
// All members of a team call these together and get the same answers. By the fetch side:
//   bool vacant(k)                          stage k has been released by its former user
//   void fetch(k, Stage, source)            describes stage k and starts its load; null: no bytes.
//                                           What this side has observed comes before what the
//                                           store side does with the stage
// by the store side:
//   bool loaded(k)                          stage k's bytes may be stored; what any member has
//                                           observed before comes before the stores of all
//   const Stage& stage(k)                   of a loaded stage
//   void store(k, destination, bytes)       each member for a destination of its own; null: none
//   void store_far(k, rank, offset, bytes, flag, value)
//                                           where kFar: to a peer without load/store access. With
//                                           flag >= 0, that flag there gets `value` after all that
//                                           has been stored there: a publish that travels along
//   uint32_t commit_and_wait_source(k)      closes the stores of stage k and returns their ticket;
//                                           may wait until earlier stages have been read
//   bool reusable(k)                        its stores, if it had any, have read the stage; says
//                                           nothing of delivery
//   void release(k)                         gives it back to the fetch side, once all members have
//                                           looked at the stage
//   bool wait_delivered(ticket, may_block, f)
//                                           once every commit up to `ticket` is visible where it
//                                           went (0: at once, before any store), calls f(Delivered)
//                                           in all members and returns true. `may_block`: there is
//                                           nothing else to do, so it may wait for that
//   void loads_complete()                   orders finished loads before what follows

// ---- checking a peer ----------------------------------------------------------------------------

enum class FlagState : int32_t { kArrived, kWaiting, kFault };

struct Epoch {
  uint64_t number = 0;
  CallRecord record;  // what this rank publishes, and what peers must show
};

// What a record that is not our call's says about a peer that owes us something in this call. A
// peer that is beyond the call while it still owes has made a different call, and so has one whose
// farewell comes after more calls than ours.
UEC_HD inline Fault blame(CallRecord seen, const Epoch& epoch) {
  if (seen.kind() == RecordKind::kRejected) return Fault::kRejected;  // final, whatever its number
  const int32_t ahead = seen.ahead_of(epoch.number);
  if (seen.kind() == RecordKind::kClosed && ahead <= 0) return Fault::kClosed;
  return ahead >= 0 ? Fault::kMismatch : Fault::kNone;
}

// What was waited for has been seen in a flag that `rank` writes.
template <class Memory>
UEC_HD FlagState arrived(Memory& memory, int32_t rank, int64_t offset, uint64_t seen) {
  if constexpr (requires { memory.acquire_from(rank, offset, seen); })
    memory.acquire_from(rank, offset, seen);
  return FlagState::kArrived;
}

// Whether `rank` is in the same call as we are: the gate for storing to it or loading from it.
// Rule: nobody touches a rank's memory before having seen its record for this epoch with the same
// digest. A peer that owes us its record but is beyond this epoch has made a different call.
template <class Memory>
UEC_HD FlagState check_call(Memory& memory, int64_t call_offset, int32_t rank, const Epoch& epoch,
                            Fault* fault) {
  const CallRecord seen{memory.observe(call_offset)};
  if (seen.word == epoch.record.word) return arrived(memory, rank, call_offset, seen.word);
  Fault found = blame(seen, epoch);
  if (found == Fault::kNone) {
    if (!memory.peer_gone(rank)) return FlagState::kWaiting;
    // It may have called and then ended; what it published before stands.
    if (memory.observe(call_offset) != seen.word) return FlagState::kWaiting;
    found = Fault::kGone;
  }
  *fault = found;
  return FlagState::kFault;
}

// Whether the flag at `offset`, written by `rank`, has this epoch; if not, whether it still can.
// `rank`'s record for a later epoch is ordered after all its flags of this one, so the flag is read
// again before the peer is blamed.
template <class Memory>
UEC_HD FlagState check_flag(Memory& memory, int64_t offset, int64_t call_offset, int32_t rank,
                            const Epoch& epoch, Fault* fault, uint64_t* seen) {
  *seen = memory.observe(offset);
  if (*seen == epoch.number) return arrived(memory, rank, offset, *seen);
  if constexpr (requires { memory.should_diagnose(); })
    if (!memory.should_diagnose()) return FlagState::kWaiting;
  const CallRecord record{memory.observe(call_offset)};
  Fault suspicion = record.word == epoch.record.word ? Fault::kNone : blame(record, epoch);
  if (suspicion == Fault::kNone && memory.peer_gone(rank)) suspicion = Fault::kGone;
  if (suspicion == Fault::kNone) return FlagState::kWaiting;
  *seen = memory.observe(offset);
  if (*seen == epoch.number) return arrived(memory, rank, offset, *seen);
  *fault = suspicion;
  return FlagState::kFault;
}

}  // namespace uec
