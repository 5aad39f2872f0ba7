#include "core/norm/room.h"

#include <algorithm>

namespace fused_norm {
namespace {

constexpr int kStrangeSwaps = 2, kStrangeMoves = 2;
constexpr int kPossibleLooks = 8;  // at parameters that may move with neither counter nor optimizer

int64_t in_fours(int64_t columns) { return (columns + 3) / 4 * 4; }

}  // namespace

ColumnCounts unpack_report(uint64_t word) {
  constexpr uint64_t kMost = (uint64_t{1} << kCountBits) - 1;
  return {(word >> 63) != 0, (word >> 62 & 1) != 0, static_cast<uint16_t>(word >> 2 * kCountBits),
          static_cast<int64_t>(word >> kCountBits & kMost), static_cast<int64_t>(word & kMost)};
}

RoomLimits room_limits(int64_t cols, int x_bytes) {
  const int side_bytes = x_bytes == 8 ? 8 : 4;
  return {cols, std::min(cols * x_bytes / (2 * side_bytes), kMostRoom)};
}

int64_t chosen_room(int64_t columns, const RoomLimits& limits) {
  if (columns == 0) return 0;
  if (columns > limits.most) return kSaveInput;
  return std::min(in_fours(columns + columns / 4 + 4), limits.cols);
}

int64_t fixed_room(int64_t at_risk, const RoomLimits& limits, int generation) {
  if (generation >= kLastGeneration || (generation == kLastGeneration - 1 && at_risk > 0))
    return kSaveInput;
  const int64_t least = std::min(in_fours(std::max<int64_t>(16, limits.cols / 256)), limits.cols);
  const int64_t room = std::max(least, std::min(in_fours(4 * at_risk), limits.most));
  return is_near(at_risk, room, limits.cols) ? kSaveInput : std::min(room, kMostRoom);
}

bool is_near(int64_t at_risk, int64_t room, int64_t cols) {
  return room < cols && at_risk > room / 4 * 3;
}

void ParamsHistory::see(const ParamsSeen& now) {
  const bool swapped = seen_ && (now.weight != known_.weight || now.bias != known_.bias);
  const uint32_t move = seen_ ? now.version - known_.version : 0;
  known_ = now;
  seen_ = true;
  if (swapped && swaps_ < kStrangeSwaps) {
    ++swaps_;
    must_look_ = unverified_ = true;
  }
  if (move == 0) return;
  move_ += move;
  updated_ = changed_ = unverified_ = true;
}

void ParamsHistory::after_step(const ParamsSeen& now) {
  known_ = now;
  seen_ = updated_ = changed_ = stepped_ = true;
}

void ParamsHistory::advance() {
  if (!updated_) return;
  updated_ = false;
  ++stamp_;
  ++updates_;
}

ParamsHistory::Choice ParamsHistory::choose(bool in_backward, bool trainable) {
  if (in_backward && chosen_ && outstanding_ > 0 && !stepped_) return Choice::kKeep;
  if (!in_backward) ++outstanding_;
  // A move that comes again each time is a habit.
  if (move_ != 0 || backward_ran_) {
    same_moves_ = move_ != 0 && move_ == last_move_ ? same_moves_ + 1 : 0;
    must_look_ |= move_ != 0 && same_moves_ < kStrangeMoves;
    last_move_ = move_;
    move_ = 0;
  }
  must_look_ |= !chosen_ || (updated_ && updates_ == 0);
  const bool changed = changed_;
  advance();
  if (!changed && updates_ == 0 && backward_ran_ && moves_unseen_ && trainable &&
      looks_ < kPossibleLooks) {
    ++looks_;
    must_look_ = true;
  }
  if (must_look_) return Choice::kLook;
  if (!changed) return Choice::kKeep;
  changed_ = stepped_ = backward_ran_ = false;
  return Choice::kFromReport;
}

void ParamsHistory::looked(const ColumnCounts& counts) {
  if (chosen_) moves_unseen_ = counts.moved;
  chosen_ = true;
  must_look_ = unverified_ = changed_ = stepped_ = backward_ran_ = false;
}

uint16_t ParamsHistory::backward() {
  advance();
  backward_ran_ = true;
  outstanding_ = std::max(0, outstanding_ - 1);
  return stamp_;
}

bool ParamsHistory::is_doubtful(const ColumnCounts& counts, bool fixed, bool captured) const {
  // How fast the parameters move is known from the second update on.
  return unverified_ || !(captured ? counts.valid : is_recent(counts)) || (fixed && updates_ < 2);
}

}  // namespace fused_norm
