// Who knows what, and races: accesses of which neither comes before the other.
#include <algorithm>
#include <cstdio>

#include "machine.hpp"

namespace ptx_machine {

// ---- what lanes know ----------------------------------------------------------------------------

// What a lane has done and knows so far, for those who acquire it.
KnownPtr Machine::publish(Warp& w, int lane) {
  Lane& own = w.lanes[lane];
  KnownPtr known = own.known.copy();
  known->of[kGeneric].add_warp(w.index, w.clock);
  Moment now = w.moment(lane);
  ++now.step;
  known->of[kGeneric].add(now);
  ++own.step;
  return known;
}

// From another block only what comes before ordinary accesses: a proxy fence there is none here.
void Machine::join(Warp& w, int lane, const KnownPtr& known, bool from_other_block) {
  Lane& own = w.lanes[lane];
  if (!known || own.joined == known || own.known == known) return;
  KnownPtr sum = own.known.copy();
  sum->add(*known, from_other_block ? 1 : kViews);
  own.known = sum;
  own.joined = known;
}

// After a barrier of these lanes.
void Machine::join_lanes(Warp& w, uint32_t lanes) {
  if (options_.timed()) return;
  if ((lanes & w.live) != w.live) {
    const KnownPtr all = KnownPtr::make();
    each_lane(lanes, [&](int l) { all->add(*publish(w, l)); });
    each_lane(lanes, [&](int l) { join(w, l, all); });
    return;
  }
  const KnownPtr first = w.lanes[std::countr_zero(w.live)].known;
  std::set<Known*> others;
  each_lane(w.live, [&](int l) {
    if (!(w.lanes[l].known == first)) others.insert(w.lanes[l].known.get());
  });
  if (!others.empty()) {
    const KnownPtr all = first.copy();
    for (Known* const k : others) all->add(*k);
    for (Lane& lane : w.lanes) lane.known = all;
  }
  ++w.clock;
  if (w.clock == Access::kMaxClock) trap("more barriers of a warp than the shadow can count");
  for (Lane& lane : w.lanes) lane.step = 0;
}

void Machine::join_block(Block& block) {
  if (options_.timed()) return;
  const KnownPtr all = KnownPtr::make();
  std::set<Known*> seen;
  for (const auto& w : block.warps)
    each_lane(w->live, [&](int l) {
      if (seen.insert(w->lanes[l].known.get()).second) all->add(*w->lanes[l].known);
    });
  for (const auto& w : block.warps) all->of[kGeneric].add_warp(w->index, ++w->clock);
  all->of[kGeneric].forget_covered();
  for (const auto& w : block.warps)
    for (Lane& lane : w->lanes) {
      lane.known = all;
      lane.step = 0;
    }
}

// What this lane knows so far comes before what the async proxy does for those who know of the
// fence.
void Machine::proxy_fence(Warp& w, int lane, Space space) {
  Lane& own = w.lanes[lane];
  KnownPtr known = own.known.copy();
  Moment now = w.moment(lane);
  ++now.step;
  for (const View view : {kAsyncGlobal, kAsyncShared}) {
    if (space == (view == kAsyncGlobal ? Space::kShared : Space::kGlobal)) continue;
    known->of[view].add(known->of[kGeneric]);
    known->of[view].add_warp(w.index, w.clock);
    known->of[view].add(now);
  }
  ++own.step;
  own.known = known;
  own.joined = {};
}

// ---- releases and acquires ----------------------------------------------------------------------

void Machine::set_release(const Warp& w, uint64_t address, const KnownPtr& known, Scope scope) {
  if (options_.timed()) return;
  if (known)
    releases_[address] = {known, scope, w.block};
  else
    releases_.erase(address);
}

bool Machine::covers(Scope scope, const Block& a, const Block& b) {
  switch (scope) {
    case Scope::kSystem:
      return true;
    case Scope::kDevice:
      return a.device == b.device;
    case Scope::kCluster:
      return a.cluster == b.cluster;
    case Scope::kBlock:
      return a.id == b.id;
    default:
      return false;
  }
}

// `now`: by the load itself; otherwise by this lane's next fence.
void Machine::acquire(Warp& w, int lane, uint64_t address, Scope scope, bool now) {
  const auto it = releases_.find(address);
  if (it == releases_.end()) return;
  const Release& release = it->second;
  if (!covers(release.scope, *w.block, *release.block)) return;
  if (!covers(scope, *w.block, *release.block)) return;
  if (now) return join(w, lane, release.known, release.block != w.block);
  auto& observed = w.lanes[lane].observed;
  if (observed.size() < 64) observed.push_back({release.known, scope});
}

// ---- races --------------------------------------------------------------------------------------

bool Machine::knows(const Warp& w, int lane, const Moment& m, View view) const {
  if (view == kGeneric) {
    if (m.lane == w.lane_id(lane)) return true;
    if (m.lane / 32 == w.index && m.clock < w.clock % Access::kMaxClock) return true;
  }
  return w.lanes[lane].known->of[view].covers(m);
}

// Whether what was done before comes before what this lane does now, by which proxy.
bool Machine::ordered(const Access& before, bool wrote, const Warp& w, int lane, const Access& now,
                      View view) {
  if (before.is_copy()) {
    const Copy& c = copy(before.copy());
    // Proxies of one block are in step once its copy has been waited for.
    const View of = view == kGeneric || c.warp->block == w.block ? kGeneric : view;
    const auto& seen = c.seen(wrote);
    return std::any_of(seen.begin(), seen.end(),
                       [&](const Moment& m) { return knows(w, lane, m, of); });
  }
  if (before.is_strong() && now.is_strong()) {  // at scopes that include each other: no race
    const Block& other = *warps_[before.warp()]->block;
    if (covers(before.scope(), *w.block, other) && covers(now.scope(), *w.block, other))
      return true;
  }
  return knows(w, lane, before.moment(), view);
}

void Machine::access(const Warp& w, int lane, uint64_t address, uint32_t bytes, bool writes,
                     uint64_t how, uint32_t pc, bool shared) {
  const Access mine(w.moment(lane), pc, how);
  shadow_.each(address, bytes, [&](Shadow::Page& page, uint64_t first, uint64_t end, uint64_t at) {
    Access wrote;
    Readers readers{};
    for (uint64_t i = first; i < end; ++i, ++at) {
      if (page.write[i].none()) {
        if (shared && !writes && (module_.code[pc].used_bytes >> (at - address) & 1) != 0)
          note_uninitialised(pc);
      } else if (page.write[i] != wrote) {
        wrote = page.write[i];
        if (!ordered(wrote, true, w, lane, mine, kGeneric))
          race(writes ? "a write races with a write" : "a read races with a write", wrote, w, lane,
               pc, at);
      }
      if (!writes) {
        page.note_read(i, mine);
        continue;
      }
      if (page.readers[i] != readers) {
        readers = page.readers[i];
        for (const Access& read : readers)
          if (!read.none() && !ordered(read, false, w, lane, mine, kGeneric))
            race("a write races with a read", read, w, lane, pc, at);
      }
      page.write[i] = mine;
      page.readers[i] = {};
    }
  });
}

void Machine::access_by_copy(const Warp& w, int lane, uint64_t address, uint32_t bytes, bool writes,
                             const Copy& copy, View view) {
  if (options_.timed()) return;
  const Access mine = Access::of_copy(copy.id);
  shadow_.each(address, bytes, [&](Shadow::Page& page, uint64_t first, uint64_t end, uint64_t at) {
    Access wrote;
    Readers readers{};
    for (uint64_t i = first; i < end; ++i, ++at) {
      if (!page.write[i].none() && page.write[i] != wrote) {
        wrote = page.write[i];
        if (!ordered(wrote, true, w, lane, mine, view))
          race(writes ? "a copy's write is not ordered behind a write"
                      : "a copy's read is not ordered behind a write, or no proxy fence is between",
               wrote, w, lane, copy.pc, at);
      }
      if (!writes) {
        page.note_read(i, mine);
        continue;
      }
      if (page.readers[i] != readers) {
        readers = page.readers[i];
        for (const Access& read : readers)
          if (!read.none() && !ordered(read, false, w, lane, mine, view))
            race("a copy's write is not ordered behind a read, or no proxy fence is between", read,
                 w, lane, copy.pc, at);
      }
      page.write[i] = mine;
      page.readers[i] = {};
    }
  });
}

void Machine::race(const char* what, const Access& before, const Warp& w, int lane, uint32_t pc,
                   uint64_t) {
  std::string other;
  if (before.is_copy()) {
    static const char* const forms[] = {"the bulk load at ", "the bulk store at ",
                                        "the copy between blocks at ", "the put at ",
                                        "the signal at "};
    const Copy& c = copy(before.copy());
    other = forms[c.form] + where(c.pc);
  } else {
    other = where(before.pc());
  }
  // Threads are named for one of a kind only: kinds are distinguished by their places.
  static std::set<std::string> named;
  const std::string kind = std::string(what) + ": " + where(pc) + " and " + other;
  if (named.insert(kind).second && named.size() < 20) {
    std::fprintf(stderr, "ptx machine: %s", who(w, lane).c_str());
    if (!before.is_copy())
      std::fprintf(
          stderr, "; %s",
          who(*warps_[before.warp()], static_cast<int>(before.moment().lane % 32)).c_str());
    std::fprintf(stderr, "\n");
  }
  violate(kind);
}

void Machine::note_uninitialised(uint32_t pc) {
  const std::string place = where(pc);
  for (size_t at = 0; at < options_.holes.size();) {
    const size_t comma = std::min(options_.holes.find(',', at), options_.holes.size());
    const std::string hole = options_.holes.substr(at, comma - at);
    const size_t found = place.find("/" + hole);
    if (found != std::string::npos && (place + " ").find(' ', found) == found + 1 + hole.size())
      return;
    at = comma + 1;
  }
  violate("uninitialised shared memory is read: " + place);
}

}  // namespace ptx_machine
