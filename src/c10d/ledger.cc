#include "c10d/ledger.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/digest.hpp"

namespace uec::c10d {
namespace {

// Chunks that a rank has under way at least, where experts are long enough.
constexpr int32_t kInFlight = 3;
// The cost model's price of a group is that of a message, over this.
constexpr int32_t kChunkGroups = 8;

// Bounds a message: a chunk may be a whole expert, and sizes in it are 32-bit numbers.
constexpr int64_t kMaxPartBytes = 1 << 30;

}  // namespace

Ledger::Ledger(EngineConfig config)
    : config_(std::move(config)),
      layout_(config_),
      topology_(config_.topology()),
      tables_(layout_.tables(config_)),
      banks_(topology_, config_.num_banks),
      digest_(config_.initial_digest()),
      slots_to_fill_(int64_t{topology_.num_ranks} * topology_.slots_per_rank) {
  const Capacity capacity = layout_.capacity(config_);
  const int64_t call_bytes = CallArrays::cut(nullptr, capacity, &arrays_);
  memory_.resize((call_bytes + ScheduleArrays::cut(nullptr, capacity, &work_)) / 8);
  auto* const base = reinterpret_cast<std::byte*>(memory_.data());
  CallArrays::cut(base, capacity, &arrays_);
  ScheduleArrays::cut(base + call_bytes, capacity, &work_);
  arrays_.bind_arrays(&call_);
}

Prepared Ledger::enter(uint64_t digest) {
  digest_ = mix(digest_, digest);
  Prepared prepared{};
  prepared.epoch = ++epoch_;
  prepared.digest = digest_;
  prepared.mode = work_.schedule.mode;
  prepared.is_empty = shape_.num_replicas == 0;
  std::fill(slots_to_fill_.begin(), slots_to_fill_.end(), 0);
  const Schedule& s = work_.schedule;
  for (int32_t i = 0; i < shape_.num_replicas; ++i)
    slots_to_fill_[s.replica_rank[i] * topology_.slots_per_rank + s.replica_slot[i]] = 1;
  return prepared;
}

Prepared Ledger::replicate(ReplicateArgs args) {
  // Nothing is loaded from a peer's memory here: what pull would load, the home pushes.
  if (args.mode == static_cast<int32_t>(Mode::kPull)) args.mode = static_cast<int32_t>(Mode::kPush);
  args.region = -1;
  banks_.enter(args);
  const uint64_t digest =
      schedule_call(SingleThread{}, tables_, args, arrays_, work_, &shape_, &call_);
  const Schedule& s = work_.schedule;
  banks_.note(args, epoch_ + 1);
  Prepared prepared = enter(digest);
  bool relays = false;
  for (int32_t x = 0; x < s.num_experts; ++x)
    relays |= s.boundaries(x)[1] != s.boundaries(x)[s.num_replicas(x) + 1];
  Rounds rounds = cut_transfer(s, chunk_groups(relays));
  list_steps(rounds, false, &prepared);
  return prepared;
}

Prepared Ledger::reduce(const ReduceArgs& args) {
  // The model has the summing rank load what is sent to it here; adding costs nothing beside that.
  GroupTables tables = tables_;
  tables.cost.load_per_kib = std::exchange(tables.cost.store_per_kib, 0);
  const uint64_t digest =
      schedule_call(SingleThread{}, tables, args, arrays_, work_, &shape_, &call_);
  const Schedule& s = work_.schedule;
  Prepared prepared = enter(digest);
  bool relays = false;
  for (int32_t x = 0; x < s.num_experts; ++x) relays |= s.boundaries(x)[1] == 0;
  Rounds rounds = cut_reduction(s, chunk_groups(relays));
  list_steps(rounds, true, &prepared);
  return prepared;
}

Prepared Ledger::gather() {
  shape_ = {};
  return enter(static_cast<uint64_t>(Operation::kGather));
}

// Flag groups of a chunk. A transfer of B bytes over a rank's link in chunks of c bytes takes about
// (B / c + d) (c / rate + m): d chunks fill the pipeline, and m is what a message costs besides its
// bytes. That is least at c = sqrt(B m rate / d). Data that no rank forwards need not be cut.
int32_t Ledger::chunk_groups(bool relays) const {
  const int32_t groups = call_.tiles.num_groups();
  if (!relays) return std::max(groups, 1);
  const CostModel& cost = tables_.cost;
  const Schedule& s = work_.schedule;
  int64_t busiest = shape_.max_imports * kEgressUnit;
  for (int32_t r = 0; r < topology_.num_ranks; ++r) busiest = std::max(busiest, s.egress[r]);
  const double group_bytes =
      static_cast<double>(call_.tiles.expert_bytes()) / static_cast<double>(groups);
  const double bytes = static_cast<double>(call_.tiles.expert_bytes()) *
                       static_cast<double>(busiest) / static_cast<double>(kEgressUnit);
  const double messages_bytes = static_cast<double>(cost.group * kChunkGroups) * 1024 /
                                static_cast<double>(std::max<int64_t>(cost.store_per_kib, 1));
  // Rounds until the receivers of a widely replicated expert are all busy.
  const double fill = 1 + (shape_.max_fanout + 1) / 2;
  const double chunk = std::sqrt(bytes * messages_bytes / fill);
  const auto most = std::max(groups / kInFlight, 1);
  return static_cast<int32_t>(std::clamp(std::round(chunk / group_bytes), 1.0, 1.0 * most));
}

void Ledger::list_steps(Rounds& rounds, bool is_reduction, Prepared* prepared) const {
  Matcher(topology_.num_ranks, rounds).run();
  const TileMap& tiles = call_.tiles;
  const Schedule& s = work_.schedule;
  const int32_t rank = config_.rank;
  int64_t tag = 0;
  const int64_t most = std::max<int64_t>(kMaxPartBytes / tiles.tile_bytes, 1);
  int32_t chunk = 0, entry = -1;
  // Calls body(segment, offset, bytes, tag) for the parts of a hop.
  const auto each_part = [&](const Hop& hop, auto&& body) {
    const int64_t end = std::min<int64_t>(int64_t{hop.end} * tiles.group_tiles, tiles.num_tiles());
    for (int64_t tile = int64_t{hop.begin} * tiles.group_tiles; tile < end; ++tag) {
      const TileSpan span = tiles.span(tile, std::min(end, tile + most));
      body(span, tag);
      tile += ceil_div(span.bytes, tiles.tile_bytes);
    }
  };
  const auto kept = [&](const Hop& hop,
                        const TileSpan& span) {  // of the slot of the rank that sums
    const int32_t* const first = s.replica_rank + s.first[hop.entry];
    const int32_t n = s.num_replicas(hop.entry);
    const auto own = static_cast<int32_t>(std::find(first, first + n, hop.from) - first);
    return Step{hop.round,
                StepKind::kKeepGrad,
                rank,
                -1,
                span.segment,
                span.offset,
                span.bytes,
                s.replica_slot[s.first[hop.entry] + own],
                s.expert[hop.entry],
                chunk,
                hop.behind,
                -1,
                own};
  };
  for (const Hop& hop : rounds.hops) {
    chunk = hop.entry == entry ? chunk + 1 : 0;
    entry = hop.entry;
    const bool sends = hop.from == rank, receives = hop.to == rank;
    const int32_t expert = s.expert[entry];
    const int32_t main = tables_.local_idx[expert];
    const auto slot_of = [&](int32_t replica) { return s.replica_slot[s.first[entry] + replica]; };
    each_part(hop, [&](const TileSpan& span, int64_t its_tag) {
      if (!sends && !receives) return;
      Step step{hop.round,
                StepKind::kReceive,
                sends ? hop.to : hop.from,
                its_tag,
                span.segment,
                span.offset,
                span.bytes,
                -1,
                expert,
                chunk,
                -1,
                sends && hop.behind >= 0 ? rounds.gates[hop.behind].opened : -1,
                hop.replica};
      if (!is_reduction) {
        if (receives) {
          step.place = slot_of(hop.replica);
        } else if (hop.behind >= 0) {  // a hub, whose replica the chunk came for
          const int32_t* const first = s.replica_rank + s.first[entry];
          const auto own = std::find(first, first + s.num_replicas(entry), rank) - first;
          step.kind = StepKind::kSendSlot;
          step.place = slot_of(static_cast<int32_t>(own));
        } else {
          const bool is_main = s.source[entry].slot == kMainSlot;
          step.kind = is_main ? StepKind::kSendMain : StepKind::kSendSlot;
          step.place = is_main ? main : s.source[entry].slot;
        }
      } else if (hop.replica == kSum) {
        step.kind = sends ? StepKind::kSendSum : StepKind::kAddSum;
        step.gate = sends ? hop.behind : -1;
        step.place = sends ? -1 : main;
        if (sends) prepared->steps.push_back(kept(hop, span));
      } else {
        step.kind = sends ? StepKind::kSendGrad : StepKind::kAddGrad;
        step.gate = sends ? -1 : hop.opens;
        // A home that sums adds to its main at once.
        const bool is_home = receives && s.source[entry].rank == rank;
        if (sends) step.place = slot_of(hop.replica);
        if (is_home) step.place = main;
      }
      prepared->steps.push_back(step);
    });
  }
  std::stable_sort(prepared->steps.begin(), prepared->steps.end(),
                   [](const Step& a, const Step& b) { return a.round < b.round; });
}

}  // namespace uec::c10d
