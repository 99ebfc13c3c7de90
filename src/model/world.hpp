// A described machine at work: a clock, the ranks' links, and the flags of all ranks.
//
// A copy occupies its sender's link for its bytes, and its receiver's link from then on at the
// earliest: the switch between them never blocks. Copies that wait for a link are served round
// robin, one of each stream: a worker's stores are a stream, in their order, and so are a rank's
// loads from another (or, where those are not served fairly, each load).
//
// Where cores copy, a sender's link is its core, and the memory that they share takes the place of
// all receivers' links.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <queue>
#include <stdexcept>
#include <vector>

#include "model/machine.hpp"

namespace uec::model {

// The end of the clock, 26 days: no copy or latency takes that long, so sums of two stay in range.
inline constexpr int64_t kEndOfTime = int64_t{1} << 61;

// Mirrors Span in ultraep_comm/model/timeline.py.
enum class SpanKind : int32_t { kCall = 0, kStore = 1, kLoad = 2, kWait = 3 };

struct Span {
  int32_t rank;
  SpanKind kind;
  int32_t peer, expert, piece;
  int64_t begin, end, bytes;
};

// Part of a tile's way: one destination of a store, or a remote load.
struct Copy {
  int32_t from = 0, to = 0;
  int32_t worker = 0;
  uint32_t stage = 0;
  int32_t expert = -1, piece = -1;
  int64_t bytes = 0;
  int64_t extra = 0;  // picoseconds more of the sender
  bool is_load = false;
};

enum class EventKind : int32_t { kLink, kRequest, kLoaded, kDelivered, kFlag, kFree };

struct Event {
  int64_t time;
  uint64_t order;  // of events at one time: as they were scheduled
  EventKind kind;
  int32_t who;  // link, worker or rank
  int64_t what;
  uint64_t value;

  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : order > other.order;
  }
};

class World {
 public:
  std::vector<int64_t> egress_busy, ingress_busy;  // [ranks] picoseconds
  std::vector<int64_t> sent;                       // [ranks] bytes
  std::vector<Span> spans;                         // if they are kept

  World(const Machine& machine, int32_t num_ranks, int64_t flag_bytes, bool keeps_spans)
      : egress_busy(num_ranks),
        ingress_busy(num_ranks),
        sent(num_ranks),
        machine_(machine),
        num_ranks_(num_ranks),
        keeps_spans_(keeps_spans),
        now_(machine.call_ps),
        arrivals_(static_cast<size_t>(num_ranks) * machine.workers * machine.stages),
        links_(2 * static_cast<size_t>(num_ranks)),
        ingress_free_(links_.size()),
        streams_(2 * static_cast<size_t>(num_ranks) * machine.workers + num_load_streams()),
        flags_(num_ranks, std::vector<uint64_t>(flag_bytes / 8)) {}

  int64_t now() const { return now_; }
  const Machine& machine() const { return machine_; }
  int32_t rank_of(int32_t worker) const { return worker / machine_.workers; }

  // ---- flags

  uint64_t& flag(int32_t rank, int64_t offset) { return flags_[rank][offset / 8]; }
  // `after`: what the sender does first.
  void publish(int32_t from, int32_t to, int64_t offset, uint64_t value, int64_t after) {
    const int64_t way = after + machine_.flag_ps + (machine_.far(from, to) ? machine_.far_ps : 0);
    schedule(from == to ? now_ : now_ + way, EventKind::kFlag, to, offset, value);
  }

  // ---- copies

  void store(const Copy& copy) {
    const bool far = machine_.far(copy.from, copy.to);
    enqueue(2 * copy.worker + far, copy);
  }
  void load(const Copy& copy, int64_t after) {
    const int64_t way =
        after + machine_.load_ps + (machine_.far(copy.from, copy.to) ? machine_.far_ps : 0);
    if (spare_.empty()) {
      spare_.push_back(static_cast<int64_t>(requests_.size()));
      requests_.emplace_back();
    }
    const int64_t request = spare_.back();
    spare_.pop_back();
    requests_[request] = copy;
    schedule(now_ + way, EventKind::kRequest, copy.worker, request, 0);
  }

  // ---- the clock

  bool ended() const { return events_.empty(); }
  int64_t next_time() const { return events_.top().time; }

  // Takes the next event; link events are handled here.
  Event take() {
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    if (event.kind == EventKind::kRequest) {
      const Copy copy = requests_[event.what];
      spare_.push_back(event.what);
      enqueue(load_stream(copy), copy);
    } else if (event.kind == EventKind::kLink) {
      links_[event.who].busy = false;
      num_busy_ -= event.who % 2 == 0;
      serve(event.who);
    }
    return event;
  }

  void schedule(int64_t time, EventKind kind, int32_t who, int64_t what, uint64_t value) {
    check_time(time);
    events_.push({time, num_events_++, kind, who, what, value});
  }

  void note(const Span& span) {
    if (keeps_spans_ && span.end > span.begin) spans.push_back(span);
  }

  // A stage's copies: how many have not begun, and when the last one is known to be delivered.
  struct Arrivals {
    int32_t pending = 0;
    bool closed = false;  // there will be no more
    int64_t last = 0;
  };
  Arrivals& arrivals_of(int32_t worker, uint32_t stage) {
    const auto stages = static_cast<uint32_t>(machine_.stages);
    return arrivals_[static_cast<size_t>(worker) * stages + stage % stages];
  }
  // Called once a stage is closed and all its copies have begun: their ends are known by then.
  void deliver_if_done(int32_t worker, uint32_t stage) {
    const Arrivals& a = arrivals_of(worker, stage);
    if (a.closed && a.pending == 0)
      schedule(std::max(a.last, now_), EventKind::kDelivered, worker, stage, 0);
  }

 private:
  struct Link {
    std::deque<int32_t> turns[2];  // streams: of stores, and of loads
    bool busy = false;
    bool loads_next = false;
  };
  struct Stream {
    std::vector<Copy> copies;
    size_t next = 0;

    // Drops copies that have begun, now and then: a stream may never be empty before its end.
    void forget() {
      if (next < copies.size() && (next < 32 || 2 * next < copies.size())) return;
      copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(next));
      next = 0;
    }
  };

  static void check_time(int64_t time) {
    if (time > kEndOfTime)
      throw std::overflow_error("the transfer takes more than 2**61 picoseconds, 26 days");
  }

  size_t num_load_streams() const {
    const auto ranks = static_cast<size_t>(num_ranks_);
    return machine_.fair ? ranks * ranks : ranks * machine_.workers * machine_.stages;
  }
  int32_t load_stream(const Copy& copy) const {
    const int32_t stores = 2 * num_ranks_ * machine_.workers;
    if (machine_.fair) return stores + copy.from * num_ranks_ + copy.to;
    const auto stages = static_cast<uint32_t>(machine_.stages);
    return stores + copy.worker * machine_.stages + static_cast<int32_t>(copy.stage % stages);
  }

  void enqueue(int32_t stream, const Copy& copy) {
    Stream& s = streams_[stream];
    s.copies.push_back(copy);
    if (s.copies.size() - s.next == 1) begin_turn(stream);
  }

  void begin_turn(int32_t stream) {
    const Copy& copy = streams_[stream].copies[streams_[stream].next];
    const int32_t link = 2 * copy.from + machine_.far(copy.from, copy.to);
    links_[link].turns[copy.is_load].push_back(stream);
    if (!links_[link].busy) serve(link);
  }

  void serve(int32_t link) {
    Link& l = links_[link];
    if (l.turns[0].empty() && l.turns[1].empty()) return;
    std::deque<int32_t>& turns =
        l.turns[l.turns[l.loads_next].empty() ? !l.loads_next : l.loads_next];
    l.loads_next = &turns == &l.turns[0];
    const int32_t id = turns.front();
    turns.pop_front();
    Stream& stream = streams_[id];
    const Copy copy = stream.copies[stream.next++];
    if (stream.next < stream.copies.size()) turns.push_back(id);
    stream.forget();
    l.busy = true;
    num_busy_ += link % 2 == 0;
    schedule(now_ + pass(copy), EventKind::kLink, link, 0, 0);
  }

  // The time of a byte now over that while all links are busy: linear between one link and all.
  double load_of_links() const {
    const double others = std::max(1, num_ranks_ - 1);
    return machine_.unloaded + (1 - machine_.unloaded) * std::min(1.0, (num_busy_ - 1) / others);
  }

  // Starts a copy; returns how long it occupies the sender's link.
  int64_t pass(const Copy& copy) {
    const bool far = machine_.far(copy.from, copy.to);
    const Rate& rate = machine_.rate(copy.is_load, far);
    const bool cores = machine_.cores();
    const double slower = far || cores ? 1 : load_of_links();
    const int64_t out = Rate::time(rate.egress * slower, copy.bytes) + copy.extra;
    const int64_t in =
        cores ? Rate::time(machine_.shared, out) : Rate::time(rate.ingress * slower, copy.bytes);
    int64_t& free = ingress_free_[cores ? 0 : 2 * copy.to + far];
    free = std::max(free, now_) + in;
    const int64_t end = std::max(free, now_ + out);
    check_time(end);
    egress_busy[copy.from] += out;
    ingress_busy[copy.to] += in;
    sent[copy.from] += copy.bytes;
    if (copy.is_load) {
      note({copy.to, SpanKind::kLoad, copy.from, copy.expert, copy.piece, now_, end, copy.bytes});
      schedule(end, EventKind::kLoaded, copy.worker, copy.stage, 0);
      return out;
    }
    note({copy.from, SpanKind::kStore, copy.to, copy.expert, copy.piece, now_, end, copy.bytes});
    Arrivals& a = arrivals_of(copy.worker, copy.stage);
    const int64_t known = end + machine_.store_ps + (far ? machine_.far_ps : 0);
    a.last = std::max(a.last, known);
    --a.pending;
    deliver_if_done(copy.worker, copy.stage);
    return out;
  }

  Machine machine_;
  int32_t num_ranks_;
  bool keeps_spans_;
  int64_t now_;
  uint64_t num_events_ = 0;
  int32_t num_busy_ = 0;  // near links out
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Arrivals> arrivals_;     // [workers][stages]
  std::vector<Copy> requests_;         // of loads, on their way
  std::vector<int64_t> spare_;         // indices of these
  std::vector<Link> links_;            // [ranks][near, far]
  std::vector<int64_t> ingress_free_;  // [ranks][near, far]
  std::vector<Stream> streams_;        // stores [workers][near, far], then loads
  std::vector<std::vector<uint64_t>> flags_;
};

}  // namespace uec::model
