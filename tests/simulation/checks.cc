// What has to hold: after a call that succeeded, of a report, and at the end.
#include "simulation/ranks.hpp"

namespace sim {

// Whether the slot is nobody's to write to in the call: it keeps what it holds.
bool Simulation::holds_resident(const RankCall& made, int32_t rank, int32_t slot) const {
  if (!made.spec.banked) return false;
  const size_t at = rank * case_.group.slots_per_rank + slot;
  return made.keeps(at) || (made.spec.plan[at] < 0 && made.resident[at] >= 0);
}

// What all ranks mean by a call's weights: those of its version, if it has one.
Content Simulation::payload(int32_t call, int32_t expert, int32_t tile) const {
  const bool banked = call < num_calls() && case_.calls[call].banked;
  const uint64_t weights = banked ? 0x8000 + case_.calls[call].version : call + 1;
  const uint64_t id =
      weights << 40 | static_cast<uint64_t>(expert + 1) << 20 | static_cast<uint64_t>(tile + 1);
  return {id, world_->tile_length(tile)};
}

Content Simulation::row(int32_t rank, int32_t call) const {
  return {(static_cast<uint64_t>(call) + 1) << 40 | static_cast<uint64_t>(rank),
          world_->shape.row_bytes};
}

void Simulation::write_main_ptrs(int32_t rank, int32_t call, bool checked) {
  for (int32_t e = 0; e < case_.group.num_experts; ++e) {
    if (case_.group.home[e] != rank) continue;
    for (int32_t tile = 0; tile < world_->num_tiles(); ++tile)
      world_->write_now(own_thread(rank), world_->main_cell(rank, main_idx_[e], tile),
                        checked ? payload(call, e, tile) : Content{}, checked);
  }
}

// A call has succeeded: filled slots are the experts of this epoch, nothing else was written.
void Simulation::check_bytes(int32_t rank) {
  const int32_t call = ranks_[rank].call, own = own_thread(rank);
  const RankCall& made = spec(rank, call);
  if (made.spec.gather) {
    for (int32_t r = 0; r < case_.group.num_ranks; ++r)
      if (world_->read_now(own, world_->table_cell(rank, r)) != row(r, call))
        world_->violate(Property::kWrongBytes, "rank %d has a wrong load row of rank %d", rank, r);
    return;
  }
  for (int32_t s = 0; s < case_.group.slots_per_rank; ++s) {
    const size_t slot = rank * case_.group.slots_per_rank + s;
    const int32_t expert =
        holds_resident(made, rank, s) ? made.resident[slot] : made.spec.plan[slot];
    for (size_t i = 0; i < case_.segment_bytes.size(); ++i) {
      const auto segment = static_cast<int32_t>(i);
      const bool filled =
          expert >= 0 && std::find(made.spec.segments.begin(), made.spec.segments.end(), segment) !=
                             made.spec.segments.end();
      for (int64_t at = 0; at < case_.segment_bytes[i]; at += case_.tile_bytes) {
        const int32_t tile = world_->tile_of(segment, at);
        const Content found = world_->read_now(own, world_->slot_cell(rank, s, tile));
        if (found == (filled ? payload(call, expert, tile) : poison(call))) continue;
        world_->violate(filled ? Property::kWrongBytes : Property::kTouched,
                        "rank %d, slot %d, tile %d after call %d: %lld bytes of payload %llx", rank,
                        s, tile, call, static_cast<long long>(found.bytes),
                        static_cast<unsigned long long>(found.id));
      }
    }
  }
}

// Whether a rank that moves bytes to or from this one in its call has made another call.
bool Simulation::met_mismatch(int32_t rank) const {
  const int32_t call = ranks_[rank].call;
  const RankCall& made = spec(rank, call);
  const uec::Worklist& w = made.work;
  const auto differs = [&](int32_t peer) {
    return spec(peer, call).record.word != made.record.word;
  };
  for (int32_t r = 0; r < case_.group.num_ranks; ++r)
    if ((made.spec.gather || w.opens[r]) && differs(r)) return true;
  for (int32_t i = 0; i < w.num_destinations; ++i)
    if (differs(w.destinations[i].rank)) return true;
  for (int32_t i = 0; i < w.num_expected; ++i)
    if (differs(w.expected[i].peer)) return true;
  for (int32_t i = 0; i < w.num_pieces; ++i)
    if (differs(w.pieces[i].source_rank)) return true;
  for (int32_t i = 0; i < w.num_reductions; ++i)
    if (differs(w.reductions[i].home)) return true;
  return false;
}

// Whether a report can be of a wait for such a flag.
bool Simulation::may_wait_for(int32_t rank, uec::FlagKind flag) const {
  using uec::FlagKind;
  if (flag == FlagKind::kCall || flag == FlagKind::kOpen) return true;
  const CallSpec& made = spec(rank, ranks_[rank].call).spec;
  if (made.reduce) return flag == FlagKind::kSummed || flag == FlagKind::kConsumed;
  if (made.gather) return flag == FlagKind::kGathered;
  return flag == FlagKind::kReady || flag == FlagKind::kDone || flag == FlagKind::kPulled;
}

void Simulation::check_report(int32_t rank) {
  const uec::Report& report = ranks_[rank].report;
  const uec::Fault fault = report.fault;
  const bool told = fault == uec::Fault::kAborted && report.aborter >= 0 &&
                    ranks_[report.aborter].phase > Phase::kAbort;
  bool right = false;
  switch (case_.ending) {
    case Ending::kSuccess:
      break;
    case Ending::kStops:
      // A rank that ran out of patience first can only name one that is calls behind; that one's
      // own report continues from there.
      right = ranks_[case_.culprit].stopped && (told || fault == uec::Fault::kTimeout) &&
              (report.root == case_.culprit || ranks_[report.root].call < ranks_[rank].call);
      break;
    case Ending::kDies:
      right = ranks_[case_.culprit].stopped && (told || fault == uec::Fault::kGone) &&
              report.root == case_.culprit;
      break;
    case Ending::kRejects:
      right = fault == uec::Fault::kRejected && report.root == case_.culprit;
      break;
    case Ending::kDisagrees:
      right = told || fault == uec::Fault::kMismatch;
      break;
    case Ending::kImpatient:
      right = rank == case_.culprit ? fault == uec::Fault::kTimeout : told && *clock_ran_out_;
      break;
  }
  if (fault == uec::Fault::kTimeout) timed_out_ |= 1u << static_cast<int>(report.wait.flag);
  if (ranks_[rank].began) right &= may_wait_for(rank, report.wait.flag);
  right &= ranks_[rank].phase != Phase::kSettle || report.epoch == calls_[rank].epoch.number;
  if (!right)
    world_->violate(case_.ending == Ending::kSuccess ? Property::kFaulted : Property::kWrongReport,
                    "rank %d, call %d: fault %d, flag %d of rank %d, aborter %d, root %d", rank,
                    ranks_[rank].call, static_cast<int>(fault), static_cast<int>(report.wait.flag),
                    report.wait.peer, report.aborter, report.root);
}

void Simulation::check_end() {
  bool failed = false, named = case_.ending != Ending::kDisagrees;
  for (int32_t rank = 0; rank < case_.group.num_ranks; ++rank) {
    const Rank& r = ranks_[rank];
    failed |= r.phase == Phase::kFailed;
    named |= r.report.fault == uec::Fault::kMismatch;
    if (r.stopped || r.phase >= Phase::kClosed) continue;
    world_->violate(Property::kStuck, "rank %d waits for ever in phase %d of call %d", rank,
                    static_cast<int>(r.phase), r.call);
  }
  const int32_t culprit = case_.culprit, other = culprit == 0 ? 1 : 0;
  if (case_.ending == Ending::kDisagrees &&
      spec(culprit, case_.at_call).record.word == spec(other, case_.at_call).record.word)
    world_->violate(Property::kMissedFault, "rank %d's call %d differs, and its record does not",
                    culprit, case_.at_call);
  if (failed && !named)
    world_->violate(Property::kWrongReport, "ranks failed, and none of them knows of a mismatch");
}

int32_t Simulation::lead() const {
  int32_t low = num_calls(), high = 0;
  for (int32_t rank = 0; rank < case_.group.num_ranks; ++rank) {
    low = std::min(low, ranks_[rank].call);
    high = std::max(high, ranks_[rank].call);
  }
  return high - low;
}

}  // namespace sim
