#include "host/slot_check.hpp"

#include <algorithm>
#include <cstring>

#include "core/base/digest.hpp"

namespace uec::host {
namespace {

// Every word is mixed with its position on its own, so that a processor works on several at a time.
// A change of a single word is always found, any other is missed with a probability of 2^-64.
uint64_t sum_block(const uint8_t* bytes, int64_t count) {
  constexpr uint64_t kPlace = 0xA24BAED4963EE407ull;
  uint64_t sum = mix(0, static_cast<uint64_t>(count)), place = 0;
  for (; count >= 8; count -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    sum += mix(place += kPlace, word);
  }
  uint64_t rest = 0;
  std::memcpy(&rest, bytes, count);
  return sum + mix(place + kPlace, rest);
}

// Stores the first byte that differs in `damage`; false: none does.
bool find_difference(const uint8_t* bytes, const uint8_t* expected, int64_t count, int64_t offset,
                     Damage* damage) {
  const auto [at, should] = std::mismatch(bytes, bytes + count, expected);
  if (at == bytes + count) return false;
  damage->offset = offset + (at - bytes);
  damage->found = *at;
  damage->expected = *should;
  return true;
}

}  // namespace

SlotCheck::SlotCheck(const EngineConfig& config, const EngineLayout& layout)
    : config_(config), layout_(layout) {
  int64_t expert_bytes = 0;
  for (const int64_t bytes : config.segment_bytes) expert_bytes += bytes;
  // Allocated now, while running out of memory can still be reported to the caller.
  untouched_.reserve(config.slots_per_rank * expert_bytes);
}

// ---- places ------------------------------------------------------------------------------------

uint8_t* SlotCheck::copy(int32_t rank, size_t segment, int32_t local_idx) const {
  return config_.check_bases[rank] + layout_.check.copies + layout_.region_offset[segment] +
         local_idx * config_.segment_bytes[segment];
}

uint64_t* SlotCheck::sums(int32_t rank, size_t segment, int32_t local_idx) const {
  const int64_t at = local_idx * layout_.check.blocks + layout_.check.first_block[segment];
  return reinterpret_cast<uint64_t*>(config_.check_bases[rank] + layout_.check.sums) + at;
}

uint8_t* SlotCheck::slot(const CheckedCall& call, size_t segment, int32_t slot) const {
  return config_.bases[config_.rank] + call.slot_offset[segment] +
         slot * config_.segment_bytes[segment];
}

std::atomic_ref<uint64_t> SlotCheck::checked(int32_t rank, int32_t local_idx,
                                             int32_t reader) const {
  auto* const flags = reinterpret_cast<uint64_t*>(config_.check_bases[rank]);
  return std::atomic_ref(flags[local_idx * layout_.symmetric.num_ranks + reader]);
}

std::atomic_ref<uint64_t> SlotCheck::verdict(int32_t rank, int32_t home) const {
  auto* const words =
      reinterpret_cast<uint64_t*>(config_.check_bases[rank] + layout_.check.verdicts);
  return std::atomic_ref(words[home]);
}

void SlotCheck::ring(int32_t rank) const {
  Doorbell(config_.bases[rank] + layout_.symmetric.doorbell).ring();
}

template <class Visit>
void SlotCheck::each_replica(const CheckedCall& call, Visit&& visit) const {
  for (int32_t r = 0; r < layout_.symmetric.num_ranks; ++r)
    for (int32_t s = 0; s < config_.slots_per_rank; ++s)
      if (const int32_t e = call.slot_expert[r * config_.slots_per_rank + s]; e >= 0)
        visit(e, r, s);
}

// ---- before ------------------------------------------------------------------------------------

void SlotCheck::remember(const CheckedCall& call) {
  const int32_t me = config_.rank;
  std::vector<uint8_t> copied(config_.num_experts, 0);
  each_replica(call, [&](int32_t e, int32_t, int32_t) {
    if (config_.home[e] != me || copied[e]++) return;
    const int32_t local_idx = layout_.local_idx[e];
    for (int32_t i = 0; i < num_segments(); ++i) {
      if (!(*call.selected)[i]) continue;
      const int64_t bytes = config_.segment_bytes[i];
      uint8_t* const to = copy(me, i, local_idx);
      std::memcpy(to, call.main_ptrs[i * layout_.num_local_experts[me] + local_idx], bytes);
      uint64_t* sum = sums(me, i, local_idx);
      for (int64_t at = 0; at < bytes; at += kCheckBlock)
        *sum++ = sum_block(to + at, std::min(kCheckBlock, bytes - at));
    }
  });

  untouched_.clear();
  for (int32_t s = 0; s < config_.slots_per_rank; ++s) {
    const bool filled = call.slot_expert[me * config_.slots_per_rank + s] >= 0;
    for (int32_t i = 0; i < num_segments(); ++i)
      if (!filled || !(*call.selected)[i])
        untouched_.insert(untouched_.end(), slot(call, i, s),
                          slot(call, i, s) + config_.segment_bytes[i]);
  }
}

// ---- after -------------------------------------------------------------------------------------

Damage SlotCheck::compare(const uint8_t* bytes, int32_t rank, size_t segment,
                          int32_t local_idx) const {
  Damage damage;
  const uint64_t* sum = sums(rank, segment, local_idx);
  const uint8_t* const from = copy(rank, segment, local_idx);
  const int64_t size = config_.segment_bytes[segment];
  for (int64_t at = 0; at < size; at += kCheckBlock) {
    const int64_t count = std::min(kCheckBlock, size - at);
    if (sum_block(bytes + at, count) == *sum++) continue;
    if (!find_difference(bytes + at, from + at, count, at, &damage)) continue;
    damage.kind = Damage::kSlot;
    damage.home = rank;
    damage.segment = static_cast<int32_t>(segment);
    break;
  }
  return damage;
}

Damage SlotCheck::find_changed_main(const CheckedCall& call) const {
  Damage damage;
  const int32_t me = config_.rank;
  std::vector<uint8_t> seen(config_.num_experts, 0);
  each_replica(call, [&](int32_t e, int32_t, int32_t) {
    if (damage.kind != Damage::kNone || config_.home[e] != me || seen[e]++) return;
    const int32_t local_idx = layout_.local_idx[e];
    for (int32_t i = 0; i < num_segments() && damage.kind == Damage::kNone; ++i) {
      if (!(*call.selected)[i]) continue;
      damage =
          compare(call.main_ptrs[i * layout_.num_local_experts[me] + local_idx], me, i, local_idx);
      if (damage.kind == Damage::kNone) continue;
      damage.kind = Damage::kSource;
      damage.expert = e;
      damage.source_changed = true;
    }
  });
  return damage;
}

Damage SlotCheck::find_damaged_slot(const CheckedCall& call) const {
  const uint8_t* untouched = untouched_.data();
  for (int32_t s = 0; s < config_.slots_per_rank; ++s) {
    const int32_t at = config_.rank * config_.slots_per_rank + s, e = call.slot_expert[at];
    for (int32_t i = 0; i < num_segments(); ++i) {
      Damage damage;
      if (e >= 0 && (*call.selected)[i]) {
        damage = compare(slot(call, i, s), config_.home[e], i, layout_.local_idx[e]);
        if (damage.kind != Damage::kNone && call.keeps(at)) damage.kind = Damage::kResident;
      } else {
        const int64_t bytes = config_.segment_bytes[i];
        if (find_difference(slot(call, i, s), untouched, bytes, 0, &damage))
          damage.kind = Damage::kUntouched;
        untouched += bytes;
      }
      if (damage.kind == Damage::kNone) continue;
      damage.expert = e;
      damage.slot = s;
      damage.segment = i;
      return damage;
    }
  }
  return {};
}

// ---- words to each other -----------------------------------------------------------------------

void SlotCheck::publish_verdict(const CheckedCall& call, bool changed) const {
  each_replica(call, [&](int32_t e, int32_t rank, int32_t) {
    if (config_.home[e] != config_.rank) return;
    verdict(rank, config_.rank).store(call.epoch << 1 | changed, std::memory_order_release);
    ring(rank);
  });
}

bool SlotCheck::has_verdict(const CheckedCall& call, int32_t home, bool* changed) const {
  const uint64_t word = verdict(config_.rank, home).load(std::memory_order_acquire);
  if (word >> 1 != call.epoch) return false;
  *changed = (word & 1) != 0;
  return true;
}

void SlotCheck::publish_checked(const CheckedCall& call) const {
  each_replica(call, [&](int32_t e, int32_t rank, int32_t) {
    if (rank != config_.rank) return;
    const int32_t home = config_.home[e];
    // Release: this rank's reads of the copy stay before the stores that overwrite it.
    checked(home, layout_.local_idx[e], rank).store(call.epoch, std::memory_order_release);
    ring(home);
  });
}

AwaitCopies::AwaitCopies(const SlotCheck& check, const CheckedCall& checked, const Call& call,
                         const HostMemory& memory)
    : call_(call), memory_(memory) {
  if (checked.resident == nullptr) return;
  check.each_replica(checked, [&](int32_t e, int32_t rank, int32_t) {
    if (rank == check.config_.rank) homes_.emplace_back(check.config_.home[e], e);
  });
}

// A home announces its call once it has made its copies: see SlotCheck::remember().
Step AwaitCopies::step() {
  const size_t first = next_;
  for (; next_ < homes_.size(); ++next_) {
    const auto [home, expert] = homes_[next_];
    const int64_t at = call_.layout.call(home);
    const FlagState state = check_call(memory_, at, home, call_.epoch, &fault_);
    if (state == FlagState::kArrived) continue;
    wait_ = {FlagKind::kCall,   home, expert, -1, CallRecord{memory_.observe(at)}.epoch_low(),
             call_.epoch.number};
    if (state == FlagState::kFault) return Step::kFailed;
    return next_ == first ? Step::kWaitsForPeer : Step::kProgress;
  }
  return Step::kFinished;
}

AwaitChecks::AwaitChecks(const SlotCheck& check, const CheckedCall& checked, const Call& call,
                         const HostMemory& memory)
    : check_(check), call_(call), memory_(memory) {
  check.each_replica(checked, [&](int32_t e, int32_t rank, int32_t) {
    if (check.config_.home[e] == check.config_.rank)
      owed_.push_back({rank, e, check.layout_.local_idx[e]});
  });
}

uint64_t AwaitChecks::Memory::observe(int64_t offset) const {
  if (offset >= 0) return memory.observe(offset);
  const Owed& owed = of.owed_[-offset - 1];
  return of.check_.checked(of.check_.config_.rank, owed.local_idx, owed.reader)
      .load(std::memory_order_acquire);
}

Step AwaitChecks::step() {
  const size_t first = next_;
  for (Memory memory{*this, memory_}; next_ < owed_.size(); ++next_) {
    const Owed& owed = owed_[next_];
    uint64_t seen = 0;
    const FlagState state =
        check_flag(memory, -static_cast<int64_t>(next_) - 1, call_.layout.call(owed.reader),
                   owed.reader, call_.epoch, &fault_, &seen);
    if (state == FlagState::kArrived) continue;
    wait_ = {FlagKind::kChecked, owed.reader, owed.expert, -1, seen, call_.epoch.number};
    if (state == FlagState::kFault) return Step::kFailed;
    return next_ == first ? Step::kWaitsForPeer : Step::kProgress;
  }
  return Step::kFinished;
}

}  // namespace uec::host
