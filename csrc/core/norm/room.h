// How much room a memory_efficient call has for listed columns (columns.h), and when the host must
// look at the parameters, or wait for a report, before it goes on. Plain C++, and no clock: what it
// knows is what it was told.
//
// Calls that choose anew each time, in eager code, have room for the columns that were at risk in
// the newest report. Calls that cannot, traced or captured, have room to spare from the start.
#pragma once

#include <cstdint>

namespace fused_norm {

constexpr int64_t kMostRoom = int64_t{1} << 24;  // kernels keep places in the list as fp32
constexpr int64_t kSaveInput = -1;

// The word of a report, ColumnReport in columns.h: two counts and a stamp.
constexpr int kCountBits = 23;
constexpr int kUpdatesAhead = 16;  // of the parameters, that a report looks ahead

struct ColumnCounts {
  bool valid, moved;
  uint16_t stamp;
  int64_t lost, at_risk;
};
ColumnCounts unpack_report(uint64_t word);

// `most`: beyond so many columns the list takes more than half of what the flag saves.
struct RoomLimits {
  int64_t cols, most;
};
RoomLimits room_limits(int64_t cols, int x_bytes);

// The room of an eager call that knows of so many columns; 0 for none.
int64_t chosen_room(int64_t columns, const RoomLimits& limits);

// The room of a traced or captured call. `generation` counts how often compiled code was compiled
// anew for want of room: the later, the more is left to saved inputs, so that it ends.
constexpr int kLastGeneration = 5;
int64_t fixed_room(int64_t at_risk, const RoomLimits& limits, int generation);

// Whether a room that cannot grow may soon be too small.
bool is_near(int64_t at_risk, int64_t room, int64_t cols);

// What the host sees of a norm's parameters without asking the device.
struct ParamsSeen {
  const void *weight = nullptr, *bias = nullptr;  // their memory
  uint32_t version = 0;                           // of their counters
};

// What is known of how the parameters of one norm change. An optimizer's step is an update, and so
// are moves of the version counter that have become a habit (a training loop without an optimizer).
// Every other move of it is a reason to look, as is other memory, but for the first two times: then
// that is a habit (FSDP).
class ParamsHistory {
 public:
  // For every call that uses the parameters, or is about to change them.
  void see(const ParamsSeen& now);
  // An optimizer has made its step.
  void after_step(const ParamsSeen& now);

  enum class Choice { kKeep, kFromReport, kLook };
  // Of an eager forward call, which sees the parameters first. In backward it is the second forward
  // pass of a checkpoint, which saves what the first did.
  Choice choose(bool in_backward, bool trainable);
  // The parameters were looked at, and the host knows the outcome.
  void looked(const ColumnCounts& counts);
  void forget() { chosen_ = false; }
  bool must_look() const { return must_look_ || !chosen_; }
  // How fast the parameters move is no longer known.
  void restart() { updates_ = 0; }

  // A backward call is about to be launched; returns the stamp of its report.
  uint16_t backward();
  uint16_t stamp() const { return stamp_; }

  // Whether the report may be too old, or the parameters may have changed by more than it tells.
  // `fixed`: the call could not choose its room; `captured`: nor the stamp.
  bool is_doubtful(const ColumnCounts& counts, bool fixed, bool captured) const;
  // The host has waited for the report of the last backward call.
  void verified() { unverified_ = false; }

  // Whether a report still covers the parameters of today.
  bool is_recent(const ColumnCounts& counts) const {
    return counts.valid && static_cast<uint16_t>(stamp_ - counts.stamp) <= kUpdatesAhead;
  }

 private:
  void advance();

  ParamsSeen known_;
  bool seen_ = false, chosen_ = false;
  bool must_look_ = false, unverified_ = false;
  bool updated_ = false;                    // since the stamp
  bool changed_ = false, stepped_ = false;  // since the choice; stepped_: by an optimizer
  bool backward_ran_ = false, moves_unseen_ = true;
  uint32_t move_ = 0, last_move_ = 0;  // of the version, but by optimizers
  int same_moves_ = 0, swaps_ = 0, looks_ = 0, updates_ = 0, outstanding_ = 0;
  uint16_t stamp_ = 0;
};

}  // namespace fused_norm
