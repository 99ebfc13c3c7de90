// The async proxy: bulk copies, which happen late, in pieces and in any order, and mbarriers.
#include <algorithm>

#include "machine.hpp"

namespace ptx_machine {
namespace {

constexpr int64_t kMaxPendingBytes = 0xFFFFF;  // of an mbarrier
constexpr uint64_t kStoreReads = 150;          // cycles until a bulk store has read its source

}  // namespace

// ---- copies -------------------------------------------------------------------------------------

Copy& Machine::add_copy(Copy::Form form, Warp& w, int lane, uint8_t* source, uint8_t* destination,
                        uint32_t bytes, uint32_t pc) {
  auto c = std::make_unique<Copy>();
  c->id = copies_.size();
  c->form = form;
  c->warp = &w;
  c->lane = lane;
  c->to_block = w.block;
  c->source = source;
  c->destination = destination;
  c->bytes = bytes;
  c->pc = pc;
  if (!c->is_load()) c->buffer.resize(bytes);
  copies_.push_back(std::move(c));
  flying_.push_back(copies_.back().get());
  return *copies_.back();
}

void Machine::bulk(Warp& w, const Instruction& i, uint32_t lanes, uint32_t pc, uint64_t at) {
  each_lane(lanes, [&](int l) { bulk_of_lane(w, i, l, pc, at); });
}

void Machine::bulk_of_lane(Warp& w, const Instruction& i, int lane, uint32_t pc, uint64_t at) {
  const auto operand = [&](int k) { return value(w, lane, i.from_operand[k], pc); };
  const uint64_t to = operand(0), from = operand(1);
  const auto bytes = static_cast<uint32_t>(operand(2));
  if (bytes == 0 || bytes % 16 != 0 || to % 16 != 0 || from % 16 != 0)
    trap("a bulk copy of " + std::to_string(bytes) +
         " bytes, or at an address, that is no multiple of 16: " + who(w, lane) + ", " + where(pc));
  const auto global = [&](uint64_t address) {
    auto* const p = reinterpret_cast<uint8_t*>(address);
    if (shared_owner(w, p) != nullptr)
      trap("a bulk copy's global address is shared memory: " + where(pc));
    check_bounds(w, lane, p, bytes, pc);
    return p;
  };
  Block* owner = nullptr;
  if (i.op == Op::kBulkStore) {
    Copy& c = add_copy(Copy::kStore, w, lane, in_window(w, lane, from, bytes, pc, &owner),
                       global(to), bytes, pc);
    if (owner != w.block) trap("a bulk store from another block's memory: " + where(pc));
    w.lanes[lane].open.push_back(c.id);
    access_by_copy(w, lane, reinterpret_cast<uint64_t>(c.source), bytes, false, c, kAsyncShared);
    access_by_copy(w, lane, reinterpret_cast<uint64_t>(c.destination), bytes, true, c,
                   kAsyncGlobal);
    return time_copy(c, at);
  }
  // To this block or, with a mask, to the same place in several blocks of the cluster.
  const uint64_t bar = operand(3);
  uint32_t ranks = 1;
  if (i.multicast) ranks = static_cast<uint32_t>(operand(4));
  each_lane(ranks, [&](int rank) {
    const uint64_t block = i.multicast ? uint64_t(rank + 1) << 24 : 0;
    Block* of_bar = nullptr;
    uint8_t* const destination =
        in_window(w, lane, i.multicast ? to % (1 << 24) | block : to, bytes, pc, &owner);
    uint8_t* const barrier =
        in_window(w, lane, i.multicast ? bar % (1 << 24) | block : bar, 8, pc, &of_bar);
    if (owner != of_bar) trap("a bulk copy's mbarrier is in another block: " + where(pc));
    const bool loads = i.op == Op::kBulkLoad;
    Block* of_source = nullptr;
    uint8_t* const source = loads ? global(from) : in_window(w, lane, from, bytes, pc, &of_source);
    Copy& c =
        add_copy(loads ? Copy::kLoad : Copy::kShared, w, lane, source, destination, bytes, pc);
    c.to_block = owner;
    c.mbarrier = reinterpret_cast<uint64_t>(barrier);
    if (!find_mbarrier(*owner, c.mbarrier, w, lane, pc).fenced)
      violate("a bulk copy's mbarrier has had no fence since its init: " + where(pc));
    access_by_copy(w, lane, reinterpret_cast<uint64_t>(source), bytes, false, c,
                   loads ? kAsyncGlobal : kAsyncShared);
    access_by_copy(w, lane, reinterpret_cast<uint64_t>(destination), bytes, true, c, kAsyncShared);
    time_copy(c, at);
  });
}

// A multiprocessor copies one after the other, a link carries one after the other.
void Machine::time_copy(Copy& c, uint64_t at) {
  if (!options_.timed()) return;
  Block& block = *c.warp->block;
  block.copier_free = std::max(at, block.copier_free) + c.bytes / costs_.bulk_bytes;
  const uint64_t issued = block.copier_free;
  if (c.form == Copy::kShared) {
    c.read_at = c.written_at = issued + costs_.cluster;
  } else if (c.form == Copy::kLoad) {
    const auto source = reinterpret_cast<uint64_t>(c.source);
    const bool far = place_of(block, source) == kWaitRemote;
    c.read_at = c.written_at = far ? over_link(block, source, c.bytes, true, issued) + costs_.remote
                                   : issued + costs_.bulk;
  } else {
    c.read_at = issued + kStoreReads;
    const auto destination = reinterpret_cast<uint64_t>(c.destination);
    const bool far = place_of(block, destination) == kWaitRemote;
    c.written_at = far ? over_link(block, destination, c.bytes, false, c.read_at) + costs_.remote
                       : c.read_at + costs_.bulk;
    events_.push({.at = c.read_at, .number = ++due_, .copy = &c});
  }
  events_.push({.at = c.written_at, .number = ++due_, .copy = &c, .arrives = true});
  c.warp->now += 4;
}

// ---- how copies go on ---------------------------------------------------------------------------

void Machine::move_one() {
  Copy& c = *flying_[random(static_cast<uint32_t>(flying_.size()))];
  if (c.is_load()) {
    read_some(c, false);
    if (c.read) remove_flying(c);
    return;
  }
  if (random(4) != 0) return;  // stores are late
  if (!c.read)
    read_some(c, false);
  else if (std::all_of(c.after.begin(), c.after.end(),
                       [&](uint64_t id) { return copy(id).written; }))
    write_some(c, false);
  if (c.written) remove_flying(c);
}

// Of a load: reads and writes.
void Machine::read_some(Copy& c, bool all) {
  if (c.read) return;
  uint32_t n = c.bytes - c.read_bytes;
  if (!all && n > 16) n = std::min(n, (1 + random((c.bytes + 15) / 16)) * 16);
  std::memcpy((c.is_load() ? c.destination : c.buffer.data()) + c.read_bytes,
              c.source + c.read_bytes, n);
  c.read_bytes += n;
  if (c.read_bytes < c.bytes) return;
  c.read = true;
  changed_at_ = steps_;
  if (!c.is_load()) return;
  c.written = true;
  const auto it = c.to_block->mbarriers.find(c.mbarrier);
  if (it == c.to_block->mbarriers.end()) trap("a bulk copy's mbarrier has gone: " + where(c.pc));
  it->second.bytes -= c.bytes;
  it->second.copying.push_back(c.id);
  end_phase(it->second);
}

void Machine::write_some(Copy& c, bool all) {
  if (c.written) return;
  uint32_t n = c.bytes - c.written_bytes;
  if (!all && n > 16) n = std::min(n, (1 + random((c.bytes + 15) / 16)) * 16);
  std::memcpy(c.destination + c.written_bytes, c.buffer.data() + c.written_bytes, n);
  c.written_bytes += n;
  if (c.written_bytes < c.bytes) return;
  c.written = true;
  changed_at_ = steps_;
  std::vector<uint8_t>().swap(c.buffer);
  arrive(c);
}

void Machine::complete(Copy& c) {
  while (!c.read) read_some(c, true);
  while (!c.is_load() && !c.written) write_some(c, true);
}

// ---- waiting for bulk stores --------------------------------------------------------------------

// Whether the warp can go on.
bool Machine::bulk_wait(Warp& w, const Instruction& i, uint32_t lanes, uint32_t pc) {
  bool all = true;
  uint64_t until = 0;
  each_lane(lanes, [&](int l) {
    Lane& lane = w.lanes[l];
    lane.wait_groups = static_cast<uint32_t>(i.from_operand[0].value);
    lane.wait_read = i.read_only;
    if (options_.timed()) {
      each_awaited(
          lane, [&](Copy& c) { until = std::max(until, i.read_only ? c.read_at : c.written_at); });
      if (!i.read_only && lane.groups.size() > lane.wait_groups)
        lane.groups.erase(lane.groups.begin(), lane.groups.end() - lane.wait_groups);
      return;
    }
    if (finish_bulk_wait(w, l)) return;
    w.status[l] = Status::kAtBulk;
    w.pc[l] = pc;
    all = false;
  });
  if (options_.timed()) wait_until(w, until, kWaitRemote);
  return all;
}

bool Machine::finish_bulk_wait(Warp& w, int lane) {
  Lane& own = w.lanes[lane];
  bool done = true;
  each_awaited(own, [&](const Copy& c) { done &= own.wait_read ? c.read : c.written; });
  if (!done) return false;
  // It is this lane that knows; others learn it from this lane.
  const Moment now = w.moment(lane);
  each_awaited(own, [&](Copy& c) {
    if (c.read_seen.empty()) c.read_seen.push_back(now);
    if (!own.wait_read && c.write_seen.empty()) c.write_seen.push_back(now);
  });
  if (!own.wait_read && own.groups.size() > own.wait_groups)
    own.groups.erase(own.groups.begin(), own.groups.end() - own.wait_groups);
  return true;
}

// ---- mbarriers ----------------------------------------------------------------------------------

Mbarrier& Machine::find_mbarrier(Block& block, uint64_t at, const Warp& w, int lane, uint32_t pc) {
  const auto it = block.mbarriers.find(at);
  if (it == block.mbarriers.end())
    trap("an mbarrier that has not been initialised: " + who(w, lane) + ", " + where(pc));
  return it->second;
}

void Machine::mbarrier(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc) {
  const bool timed = options_.timed();
  Instruction in_shared = i;
  if (in_shared.space != Space::kCluster) in_shared.space = Space::kShared;
  each_lane(lanes, [&](int l) {
    const Located found = locate(w, l, in_shared, 8, pc);
    const auto at = reinterpret_cast<uint64_t>(found.at);
    if (i.op == Op::kMbarrierInit) {
      Mbarrier fresh;
      fresh.expected = fresh.pending = static_cast<uint32_t>(value(w, l, i.from_operand[0], pc));
      fresh.init_lane = w.lane_id(l);
      found.block->mbarriers[at] = fresh;
      if (!timed) access(w, l, at, 8, true, Access::kWeak, pc, true);
      return;
    }
    Mbarrier& barrier = find_mbarrier(*found.block, at, w, l, pc);
    if (!timed) access(w, l, at, 8, false, Access::how_of(Order::kRelaxed, i.scope), pc, true);
    if (i.op == Op::kMbarrierTest) {
      const uint64_t parity = value(w, l, i.from_operand[0], pc) & 1;
      const bool done = (barrier.phase & 1) != parity;
      // The phase before the first has parity 1: complete, with nothing behind it.
      if (done && barrier.phase != 0 && !timed && i.order != Order::kRelaxed)
        observe_phase(w, l, barrier);
      put(f, l, i.to[0], done ? 1 : 0);
      return;
    }
    retire_all(w, l);
    if (!timed && i.order != Order::kRelaxed) {
      const KnownPtr mine = publish(w, l);
      KnownPtr sum = barrier.arriving ? barrier.arriving.copy() : mine;
      if (barrier.arriving) sum->add(*mine);
      barrier.arriving = sum;
    }
    if (i.op == Op::kMbarrierExpect)
      barrier.bytes += static_cast<int64_t>(value(w, l, i.from_operand[0], pc));
    if (barrier.bytes > kMaxPendingBytes)
      violate("an mbarrier expects too many bytes: " + where(pc));
    if (barrier.pending == 0)
      violate("an mbarrier has more arrivals than it expects: " + where(pc));
    else
      --barrier.pending;
    end_phase(barrier);
  });
  if (timed) result(f, i, w.now + costs_.shared, kWaitShared);
}

// Who sees that a phase has ended knows what came before the arrivals, and of the copies.
void Machine::observe_phase(Warp& w, int lane, Mbarrier& barrier) {
  join(w, lane, barrier.arrived);
  const Moment now = w.moment(lane);
  for (const uint64_t id : barrier.copied) {
    Copy& c = copy(id);
    const bool known = std::any_of(c.read_seen.begin(), c.read_seen.end(),
                                   [&](const Moment& m) { return m.lane == now.lane; });
    if (known) continue;
    c.read_seen.push_back(now);
    c.write_seen.push_back(now);
  }
}

void Machine::end_phase(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.arrived = std::exchange(barrier.arriving, {});
  barrier.copied.swap(barrier.copying);
  barrier.copying.clear();
  changed_at_ = steps_;
}

void Machine::fence_mbarriers(Warp& w, uint32_t lanes) {
  for (auto& [at, barrier] : w.block->mbarriers)
    if (barrier.init_lane / 32 == w.index && (lanes >> (barrier.init_lane % 32) & 1) != 0)
      barrier.fenced = true;
}

}  // namespace ptx_machine
