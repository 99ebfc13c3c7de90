// Rules for every transfer on a described machine, checked on its spans without the model's own
// clock.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "model/machine.hpp"
#include "model/simulation.hpp"
#include "support/check.hpp"

namespace audit {

using uec::model::Machine;
using uec::model::Outcome;
using uec::model::Rate;
using uec::model::Span;
using uec::model::SpanKind;

// A copy on its way: what a span says, in terms of links.
struct Way {
  int32_t from, to;
  bool is_load, far;
  int64_t out, in;  // picoseconds of the sender's link and of the receiver's; of cores, at least
};

inline bool is_copy(const Span& s) {
  return s.kind == SpanKind::kStore || s.kind == SpanKind::kLoad;
}

inline Way way_of(const Machine& m, const Span& s) {
  const bool is_load = s.kind == SpanKind::kLoad;
  const int32_t from = is_load ? s.peer : s.rank, to = is_load ? s.rank : s.peer;
  const bool far = m.domain_size > 0 && from / m.domain_size != to / m.domain_size;
  const Rate& rate = m.rate(is_load, far);
  const int64_t out = Rate::time(rate.egress, s.bytes);
  const int64_t in = m.shared > 0 ? Rate::time(m.shared, out) : Rate::time(rate.ingress, s.bytes);
  return {from, to, is_load, far, out, in};
}

// Spans are in the order in which copies began. A link out takes one copy after the other, and so
// does a link in; a copy ends when its last byte has been sent and has arrived. Cores share one
// link in, and some of their copies take longer: at least that time is theirs.
inline void check_links(const Machine& m, const Outcome& found) {
  const bool cores = m.shared > 0;
  std::map<std::pair<int32_t, bool>, int64_t> out_free, in_free;
  std::vector<int64_t> egress(found.finish.size()), ingress(found.finish.size());
  std::vector<int64_t> sent(found.finish.size());
  for (const Span& s : found.spans) {
    if (!is_copy(s)) continue;
    const Way way = way_of(m, s);
    CHECK(way.from != way.to || cores);
    int64_t& out = out_free[{way.from, way.far}];
    int64_t& in = in_free[{cores ? 0 : way.to, way.far}];
    CHECK(s.begin >= out);
    out = s.begin + way.out;
    in = std::max(in, s.begin) + way.in;
    const int64_t end = std::max(in, s.begin + way.out);
    if (cores)
      CHECK(s.end >= end);
    else
      CHECK_EQ(s.end, end);
    egress[way.from] += way.out;
    ingress[way.to] += way.in;
    sent[way.from] += s.bytes;
  }
  for (size_t r = 0; r < sent.size(); ++r) {
    CHECK_EQ(sent[r], found.sent[r]);
    CHECK(cores ? found.egress_busy[r] >= egress[r] : found.egress_busy[r] == egress[r]);
    CHECK(cores ? found.ingress_busy[r] >= ingress[r] : found.ingress_busy[r] == ingress[r]);
  }
}

// A writer waits for `open`, a reader asks first, and a rank that is written to ends its call only
// when it can know of it; so does the writer.
inline void check_latencies(const Machine& m, const Outcome& found) {
  for (const Span& s : found.spans) {
    if (!is_copy(s)) continue;
    const Way way = way_of(m, s);
    const int64_t far = way.far ? m.far_ps : 0, open = m.call_ps + m.flag_ps + far;
    const int64_t told = way.from == way.to ? 0 : m.flag_ps + far;
    CHECK(s.begin >= open + (way.is_load ? m.load_ps + far : 0));
    if (way.is_load) {
      CHECK(found.finish[way.to] >= s.end);
      CHECK(found.finish[way.from] >= s.end + m.flag_ps + far);  // the home, of `pulled`
    } else {
      CHECK(found.finish[way.from] >= s.end + m.store_ps + far);
      CHECK(found.finish[way.to] >= s.end + m.store_ps + far + told);
    }
  }
}

// A rank that is not an expert's home passes on to each other rank no more of it than it has been
// told of, at any time. Not of cores that pull: there, stores read at the home.
inline void check_causes(const Machine& m, const int32_t* home, const Outcome& found) {
  struct Arrival {
    int64_t known, bytes;
  };
  std::map<std::pair<int32_t, int32_t>, std::vector<Arrival>> arrived;  // by rank and expert
  for (const Span& s : found.spans) {
    if (!is_copy(s)) continue;
    const Way way = way_of(m, s);
    const int64_t told = way.is_load ? 0 : m.store_ps + m.flag_ps + (way.far ? 2 * m.far_ps : 0);
    arrived[{way.to, s.expert}].push_back({s.end + told, s.bytes});
  }
  std::map<std::tuple<int32_t, int32_t, int32_t>, int64_t> passed;  // by rank, peer and expert
  for (const Span& s : found.spans) {
    if (!is_copy(s) || way_of(m, s).from == home[s.expert]) continue;
    CHECK(s.kind == SpanKind::kStore);  // main weights are read where they are
    int64_t known = 0;
    for (const Arrival& a : arrived[{s.rank, s.expert}])
      if (a.known <= s.begin) known += a.bytes;
    CHECK((passed[{s.rank, s.peer, s.expert}] += s.bytes) <= known);
  }
}

}  // namespace audit
