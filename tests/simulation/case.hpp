// What is simulated: a group, the calls that its ranks make, and how they are meant to end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/digest.hpp"
#include "core/transfer/bank.hpp"
#include "core/transfer/failure.hpp"
#include "core/transfer/prepare.hpp"
#include "support/plans.hpp"
#include "support/prepared_call.hpp"
#include "support/worklists.hpp"

namespace sim {

enum class Ending {
  kSuccess,
  kStops,      // one rank makes no further step, and its peers are not told
  kDies,       // the same, and its peers notice at some time
  kRejects,    // one rank finds its own input bad
  kDisagrees,  // one rank makes another call than the others
  kImpatient,  // one rank gives up although nothing is wrong
};

struct CallSpec {
  bool gather = false;
  bool reduce = false, zero = false;
  uec::Mode mode = uec::Mode::kDirect;
  std::vector<int32_t> plan{};      // slot_expert
  std::vector<int32_t> segments{};  // which are transferred; empty: all
  // A transfer to a bank, whose slots keep what they hold: then main weights are those of the
  // version, in all calls.
  bool banked = false;
  uint64_t version = 0;
};

struct Case {
  std::string name;
  PlanCase group;
  std::vector<int64_t> segment_bytes{};
  std::vector<int64_t> grad_bytes{};  // of gradients in a slot; none: there are none
  std::vector<uec::GradType> grad_type{}, main_grad_type{};
  int64_t tile_bytes = 64 << 10;
  int32_t num_workers = 1;
  uint64_t first_epoch = 1;
  std::vector<CallSpec> calls{};
  Ending ending = Ending::kSuccess;
  int32_t culprit = -1;  // the one rank, and the first of its calls that may be touched
  int32_t at_call = 0;
  CallSpec other{};            // kDisagrees: what the culprit calls instead
  bool eager_delivery = true;  // deliveries are noticed while there is something else to do
  bool opened = false;  // every schedule: only from where all have called, opened and seen it
};

inline uint64_t digest_of(const CallSpec& s) {
  uint64_t d = uec::mix(s.gather, static_cast<uint64_t>(s.mode));
  if (s.reduce) d = uec::mix(d, 2 + s.zero);
  if (s.banked) d = uec::mix(d, s.version);
  d = uec::digest_ints(uec::SingleThread{}, d, s.plan.data(), static_cast<int64_t>(s.plan.size()));
  return uec::digest_ints(uec::SingleThread{}, d, s.segments.data(),
                          static_cast<int64_t>(s.segments.size()));
}

// What one rank takes its slots to hold.
struct SimBank {
  explicit SimBank(const PlanCase& group)
      : residents(group.num_ranks * group.slots_per_rank, -1),
        table{.segments = 1, .resident = residents.data()} {}
  SimBank(const SimBank&) = delete;
  SimBank& operator=(const SimBank&) = delete;

  std::vector<int32_t> residents;
  uec::BankTable table;
};

// One rank's part of one call, with the arrays it borrows.
struct RankCall {
  // `before`: the digest of the calls before; `bank`: as they have left it.
  RankCall(const Case& c, const uec::GroupTables& tables, const CallSpec& s, uint64_t epoch,
           uint64_t before, SimBank& bank)
      : spec(s) {
    if (spec.reduce)
      digest = uec::mix(before, reduce(c, tables));
    else
      digest = uec::mix(before, transfer(c, tables.rank, bank));
    record = uec::CallRecord::make(epoch, digest, uec::RecordKind::kCall);
  }

  uint64_t reduce(const Case& c, const uec::GroupTables& tables) {
    const uec::Capacity capacity{c.group.num_ranks,
                                 c.group.num_experts,
                                 c.group.slots_per_rank,
                                 c.group.num_local_experts()[tables.rank],
                                 static_cast<int32_t>(c.segment_bytes.size()),
                                 static_cast<int32_t>(c.grad_bytes.size()),
                                 1,
                                 c.group.num_domains()};
    reduction = std::make_unique<Given>(capacity);
    const uec::ReduceArgs args{.slot_expert = spec.plan.data(),
                               .plan_digest = 0,
                               .main_ptrs = nullptr,
                               .main_type = c.main_grad_type.data(),
                               .mode = static_cast<int32_t>(spec.mode),
                               .zero = spec.zero};
    Given& g = *reduction;
    const uint64_t own =
        uec::fill_call(uec::SingleThread{}, tables, args, g.arrays, g.schedule, &g.shape, &g.call);
    tiles = g.call.tiles;
    work = g.call.work;
    return own;
  }

  uint64_t transfer(const Case& c, int32_t rank, SimBank& bank) {
    if (spec.segments.empty())
      for (size_t i = 0; i < c.segment_bytes.size(); ++i)
        spec.segments.push_back(static_cast<int32_t>(i));
    first_tile.push_back(0);
    for (const int32_t i : spec.segments) {
      bytes.push_back(c.segment_bytes[i]);
      first_tile.push_back(first_tile.back() + uec::ceil_div(bytes.back(), c.tile_bytes));
    }
    tiles = {static_cast<int32_t>(bytes.size()),
             spec.segments.data(),
             bytes.data(),
             first_tile.data(),
             c.tile_bytes,
             uec::TileMap::tiles_per_group(c.tile_bytes)};
    PlanCase planned = c.group;
    planned.slot_expert = spec.plan;
    if (spec.gather) planned.clear();
    uec::ReplicateArgs args{.slot_expert = planned.slot_expert.data(),
                            .plan_digest = spec.gather,
                            .segments = spec.segments.data(),
                            .num_segments = static_cast<int32_t>(spec.segments.size())};
    const uec::Topology t = planned.topology();
    if (spec.banked) {
      uec::expire_residents(uec::SingleThread{}, t, spec.version, 1, bank.table);
      planned.resident = bank.residents;
      args.bank = {0, spec.version, planned.residents()};
    }
    const uint64_t own = uec::digest_call(uec::SingleThread{}, t, args, args.plan_digest);
    if (spec.banked)
      uec::note_residents(uec::SingleThread{}, t, args.slot_expert, bank.table);
    else if (!spec.gather)
      uec::clear_residents(uec::SingleThread{}, t, bank.table.resident);
    resident = planned.resident;
    schedule = std::make_unique<ScheduleArrays>(planned, tiles, spec.mode);
    worklist = std::make_unique<WorklistArrays>(planned, schedule->schedule, rank);
    if (spec.gather) worklist->involved.assign(c.group.num_ranks, 1);
    work = worklist->list;
    return uec::with_mode(own, args, spec.mode);
  }

  // Whether the slot is not written to, because it holds what the plan has there.
  bool keeps(size_t at) const {
    return spec.banked && resident[at] >= 0 && resident[at] == spec.plan[at];
  }

  CallSpec spec;
  uint64_t digest = 0;
  uec::CallRecord record;
  std::vector<int64_t> bytes, first_tile;
  uec::TileMap tiles;
  uec::Worklist work;
  std::unique_ptr<ScheduleArrays> schedule;
  std::unique_ptr<WorklistArrays> worklist;
  std::unique_ptr<Given> reduction;  // has its arrays
  std::vector<int32_t> resident;     // banked: [G][S] as the calls before have left them
};

}  // namespace sim
