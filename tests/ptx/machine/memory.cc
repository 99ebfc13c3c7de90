// Loads, stores and atomics. What a lane stores strongly stays with it for a while: nobody else
// sees it before a barrier, a fence or a release of the lane needs it, or chance has it arrive.
#include <algorithm>

#include "machine.hpp"

#if defined(__GNUC__)
// There if the program is built with AddressSanitizer, which knows the bounds of its allocations.
extern "C" [[gnu::weak]] void* __asan_region_is_poisoned(void* begin, size_t bytes);
#endif

namespace ptx_machine {

// ---- addresses ----------------------------------------------------------------------------------

void Machine::check_bounds(const Warp& w, int lane, const uint8_t* at, uint64_t bytes,
                           uint32_t pc) const {
  if (reinterpret_cast<uint64_t>(at) < 1 << 16)
    trap("a null pointer: " + who(w, lane) + ", " + where(pc));
  if (__asan_region_is_poisoned != nullptr &&
      __asan_region_is_poisoned(const_cast<uint8_t*>(at), bytes) != nullptr)
    trap(std::to_string(bytes) + " bytes out of the bounds of what was allocated: " + who(w, lane) +
         ", " + where(pc));
}

// The block of the same cluster whose shared memory a generic address points to; null: none.
Block* Machine::shared_owner(const Warp& w, const uint8_t* at) const {
  if (w.block->holds(at)) return w.block;
  if (w.block->cluster->blocks.size() > 1)
    for (Block* const b : w.block->cluster->blocks)
      if (b->shared != nullptr && b->holds(at)) return b;
  return nullptr;
}

// An address in the window of shared memory: of this block or, with its rank + 1 in the top byte,
// of another one of the cluster.
uint8_t* Machine::in_window(const Warp& w, int lane, uint64_t address, uint64_t bytes, uint32_t pc,
                            Block** owner) const {
  Block* block = w.block;
  const uint64_t rank = address >> 24, at = address & 0xFFFFFF;
  if (rank != 0) {
    if (rank > block->cluster->blocks.size())
      trap("an address of a block that the cluster does not have: " + where(pc));
    block = block->cluster->blocks[rank - 1];
    if (block->ended || block->shared == nullptr)
      trap("shared memory of a block that has ended, or not begun: " + who(w, lane) + ", " +
           where(pc));
  }
  if (at < kWindow || at + bytes > kWindow + static_cast<uint64_t>(block->shared_bytes))
    trap("out of the " + std::to_string(block->shared_bytes) +
         " bytes of shared memory: " + who(w, lane) + ", " + where(pc));
  *owner = block;
  return block->shared + (at - kWindow);
}

Machine::Located Machine::locate(Warp& w, int lane, const Instruction& i, uint32_t bytes,
                                 uint32_t pc) {
  Frame& f = *w.frame[lane];
  if (i.base.kind == Kind::kArea)
    return {f.area.data() + lane * f.area_stride + i.base.value + i.offset, nullptr, true};
  const uint64_t address = address_of(w, lane, i, pc);
  if (i.base.kind == Kind::kEntryParam || i.base.kind == Kind::kLocal)
    return {reinterpret_cast<uint8_t*>(address), nullptr, true};
  Located found{reinterpret_cast<uint8_t*>(address), nullptr, false};
  if (i.space == Space::kShared || i.space == Space::kCluster) {
    found.at = in_window(w, lane, address, bytes, pc, &found.block);
    if (i.space == Space::kShared && found.block != w.block)
      trap("another block's shared memory by an address of this one's: " + where(pc));
  } else {
    found.block = shared_owner(w, found.at);
    if (found.block != nullptr && i.space == Space::kGlobal)
      trap("a global access to shared memory: " + where(pc));
    if (found.block == nullptr) {
      // Parameters and local memory, whose addresses are generic too.
      const auto& params = w.block->grid->params;
      found.is_private = i.space == Space::kLocal || i.space == Space::kParam ||
                         i.space == Space::kConst ||
                         (found.at >= params.data() && found.at < params.data() + params.size());
      for (size_t d = 0; d < w.frames.size() && !found.is_private; ++d)
        for (const auto& frame : w.frames[d])
          found.is_private |= found.at >= frame->local &&
                              found.at < frame->local + 32 * int64_t{frame->local_stride};
    }
  }
  if (reinterpret_cast<uint64_t>(found.at) % bytes != 0)
    trap("misaligned: " + who(w, lane) + ", " + where(pc));
  if (found.block == nullptr && !found.is_private) check_bounds(w, lane, found.at, bytes, pc);
  return found;
}

// ---- loads --------------------------------------------------------------------------------------

void Machine::load(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc,
                   uint64_t at) {
  const int element = bytes_of(i.type), bytes = element * i.count;
  const bool timed = options_.timed();
  const uint64_t how = Access::how_of(i.order, i.scope);
  uint64_t slowest = 0, lines = 0, last_line = ~uint64_t{0}, farthest = 0;
  Wait wait = kWaitShared;
  each_lane(lanes, [&](int l) {
    const Located found = locate(w, l, i, bytes, pc);
    const auto address = reinterpret_cast<uint64_t>(found.at);
    if (!found.is_private) {
      retire_overlapping(w, l, address, bytes);
      if (!timed) {
        if (i.constant)
          for (int b = 0; b < bytes; ++b)
            if (!shadow_.page(address + b).write[(address + b) % Shadow::kPage].none()) {
              violate("memory that was written meanwhile is loaded as if it were constant: " +
                      where(pc));
              break;
            }
        if (i.order == Order::kAcquire)
          acquire(w, l, address, i.scope, true);
        else if (i.order == Order::kRelaxed)
          acquire(w, l, address, i.scope, false);
        access(w, l, address, bytes, false, how, pc, found.block != nullptr);
      }
    }
    for (int k = 0; k < i.count; ++k) {
      uint64_t v = 0;
      std::memcpy(&v, found.at + k * element, element);
      if (is_signed(i.type)) v = static_cast<uint64_t>(sign_extend(v, element));
      put(f, l, i.to[k], v);
    }
    if (!timed) return;
    uint64_t cost = 0;
    Wait here = kWaitL1;
    const uint64_t line = address / 128;
    if (found.is_private) {
      cost = i.base.kind == Kind::kArea ? costs_.alu : costs_.l1;
    } else if (found.block != nullptr) {
      here = kWaitShared;
      cost = found.block == w.block ? costs_.shared : costs_.cluster;
    } else {
      here = place_of(*w.block, address);
      const bool weak = i.order == Order::kWeak;
      if (weak && here == kWaitL2 && w.block->l1.count(line) != 0) here = kWaitL1;
      cost = costs_.of(here);
      if (weak && here != kWaitHost) w.block->l1.insert(line);
      lines += line != last_line ? 2 : 0;
      last_line = line;
      if (here == kWaitRemote) farthest = over_link(*w.block, address, bytes, true, at);
    }
    if (cost >= slowest) wait = here;
    slowest = std::max(slowest, cost);
  });
  if (!timed) return;
  uint64_t there = at + std::max(slowest, lines);
  if (farthest != 0) there = std::max(there, farthest + costs_.remote);
  if (i.order == Order::kAcquire) {  // what comes next waits
    wait_until(w, there, wait);
    w.now += 8;
    w.block->l1.clear();
    there = w.now;
  }
  result(f, i, there, wait);
}

// ---- stores -------------------------------------------------------------------------------------

void Machine::store(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc,
                    uint64_t at) {
  const int element = bytes_of(i.type), bytes = element * i.count;
  const bool timed = options_.timed();
  const uint64_t how = Access::how_of(i.order, i.scope);
  if (timed && i.order == Order::kRelease) {
    wait_for_stores(w, i.scope);
    at = w.now;
  }
  each_lane(lanes, [&](int l) {
    const Located found = locate(w, l, i, bytes, pc);
    const auto address = reinterpret_cast<uint64_t>(found.at);
    if (found.is_private) {
      for (int k = 0; k < i.count; ++k) {
        const uint64_t v = value(w, l, i.from_operand[k], pc);
        std::memcpy(found.at + k * element, &v, element);
      }
      return;
    }
    Underway mine{
        address, value(w, l, i.from_operand[0], pc), static_cast<uint32_t>(bytes), {}, i.scope};
    if (!timed) {
      access(w, l, address, bytes, true, how, pc, found.block != nullptr);
      const Lane& lane = w.lanes[l];
      if (i.order == Order::kRelease) {
        mine.known = publish(w, l);
      } else if (i.order == Order::kRelaxed && lane.fenced) {  // released by the fence before
        mine.known = lane.fenced;
        mine.scope = std::min(i.scope, lane.fence_scope);
      }
    }
    const Wait place = found.block != nullptr ? kWaitShared : place_of(*w.block, address);
    if (timed) {
      const uint64_t arrives = place == kWaitRemote
                                   ? over_link(*w.block, address, bytes, false, at) + costs_.remote
                                   : at + costs_.of(place);
      if (arrives > w.stores_done) w.stores_wait = place;
      w.stores_done = std::max(w.stores_done, arrives);
      if (i.order != Order::kWeak && i.count == 1 && found.block == nullptr) {
        events_.push({.at = (at + arrives) / 2,
                      .number = ++due_,
                      .address = address,
                      .value = mine.value,
                      .bytes = mine.bytes});
        return;
      }
    } else if (i.order != Order::kWeak && i.count == 1) {
      if (random(4) != 0) {
        underway_[w.lane_id(l)].push_back(mine);
      } else {
        retire_all(w, l);
        retire(w, mine);
      }
      return;
    } else {
      retire_overlapping(w, l, address, bytes);
    }
    for (int k = 0; k < i.count; ++k) {
      const uint64_t v = value(w, l, i.from_operand[k], pc);
      note_change(found.at + k * element, v, element);
      std::memcpy(found.at + k * element, &v, element);
    }
  });
  (void)f;
  if (timed) w.now += 2;
}

void Machine::retire(const Warp& w, const Underway& store) {
  auto* const to = reinterpret_cast<uint8_t*>(store.address);
  note_change(to, store.value, store.bytes);
  std::memcpy(to, &store.value, store.bytes);
  set_release(w, store.address, store.known, store.scope);
}

// The oldest of a random lane: stores of one lane arrive in order.
void Machine::retire_one() {
  auto it = underway_.begin();
  std::advance(it, random(static_cast<uint32_t>(underway_.size())));
  retire(*warps_[it->first / 32], it->second.front());
  it->second.pop_front();
  if (it->second.empty()) underway_.erase(it);
}

void Machine::retire_all(Warp& w, int lane) {
  const auto it = underway_.find(w.lane_id(lane));
  if (it == underway_.end()) return;
  for (const Underway& store : it->second) retire(w, store);
  underway_.erase(it);
}

// A lane sees its own stores.
void Machine::retire_overlapping(Warp& w, int lane, uint64_t address, uint32_t bytes) {
  const auto it = underway_.find(w.lane_id(lane));
  if (it == underway_.end()) return;
  for (const Underway& store : it->second)
    if (store.address < address + bytes && address < store.address + store.bytes)
      return retire_all(w, lane);
}

// ---- atomics and fences -------------------------------------------------------------------------

namespace {

uint64_t apply(Atomic operation, bool is_signed, int bytes, uint64_t old, uint64_t a, uint64_t b) {
  switch (operation) {
    case kAtomicAdd:
      return old + a;
    case kAtomicCas:
      return old == a ? b : old;
    case kAtomicExchange:
      return a;
    case kAtomicMin:
    case kAtomicMax: {
      const bool less = is_signed ? sign_extend(a, bytes) < sign_extend(old, bytes) : a < old;
      return less == (operation == kAtomicMin) ? a : old;
    }
    case kAtomicAnd:
      return old & a;
    case kAtomicOr:
      return old | a;
    default:
      return old ^ a;
  }
}

}  // namespace

void Machine::atomic(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc,
                     uint64_t at) {
  const int bytes = bytes_of(i.type);
  const uint64_t mask = mask_of(bytes);
  const bool timed = options_.timed();
  const bool releases = i.order == Order::kRelease || i.order == Order::kAcqRel;
  const bool acquires = i.order == Order::kAcquire || i.order == Order::kAcqRel;
  if (timed && releases) {
    wait_for_stores(w, i.scope);
    at = w.now;
  }
  uint64_t last = 0;
  Wait wait = kWaitL2;
  each_lane(lanes, [&](int l) {
    const Located found = locate(w, l, i, bytes, pc);
    const auto address = reinterpret_cast<uint64_t>(found.at);
    if (releases)
      retire_all(w, l);
    else
      retire_overlapping(w, l, address, bytes);
    if (!timed) {
      acquire(w, l, address, i.scope, acquires);
      access(w, l, address, bytes, true, Access::how_of(i.order, i.scope), pc,
             found.block != nullptr);
      const Lane& lane = w.lanes[l];
      KnownPtr mine;
      Scope scope = i.scope;
      if (releases) {
        mine = publish(w, l);
      } else if (lane.fenced) {
        mine = lane.fenced;
        scope = std::min(scope, lane.fence_scope);
      }
      // A chain of atomics passes on what each of them releases; a relaxed one, what came before.
      if (mine) {
        const auto it = releases_.find(address);
        if (it != releases_.end() && it->second.scope == scope &&
            it->second.block->device == w.block->device) {
          KnownPtr sum = it->second.known.copy();
          sum->add(*mine);
          mine = sum;
        }
        set_release(w, address, mine, scope);
      }
    }
    uint64_t old = 0;
    std::memcpy(&old, found.at, bytes);
    const uint64_t a = value(w, l, i.from_operand[0], pc) & mask;
    const uint64_t b = i.num_from > 1 ? value(w, l, i.from_operand[1], pc) & mask : 0;
    const uint64_t v =
        apply(static_cast<Atomic>(i.mode), is_signed(i.type), bytes, old, a, b) & mask;
    note_change(found.at, v, bytes);
    std::memcpy(found.at, &v, bytes);
    if (i.op == Op::kAtomic) put(f, l, i.to[0], old);
    if (!timed) return;
    Atomics& count = atomics_[{pc, i.mode != kAtomicCas ? "" : v != old ? " won" : " lost"}];
    if (count.times++ == 0) count.first = at;
    count.last = at;
    wait = found.block != nullptr ? kWaitShared : place_of(*w.block, address);
    const uint64_t there = found.block != nullptr ? 30 : costs_.of(wait) / 2 + 20;
    // Those on one address take turns.
    uint64_t& free = atomic_free_[address];
    const uint64_t done = std::max(at + there, free);
    free = done + (found.block != nullptr ? 2 : costs_.atomic);
    last = std::max(last, done + there);
  });
  if (!timed) return;
  if (i.op == Op::kReduce) {
    if (last > w.stores_done) w.stores_wait = wait;
    w.stores_done = std::max(w.stores_done, last);
    return;
  }
  if (acquires) {
    wait_until(w, last, wait);
    w.block->l1.clear();
  }
  result(f, i, last, wait);
}

void Machine::fence(Warp& w, const Instruction& i, uint32_t lanes) {
  each_lane(lanes, [&](int l) {
    retire_all(w, l);
    if (options_.timed()) return;
    Lane& lane = w.lanes[l];
    for (const auto& [known, scope] : lane.observed) join(w, l, known, true);
    lane.observed.clear();
    lane.fenced = publish(w, l);
    lane.fence_scope = i.scope;
  });
  if (!options_.timed()) return;
  wait_for_stores(w, i.scope);
  w.block->l1.clear();
}

}  // namespace ptx_machine
