// How much room calls have for listed columns, and when the host looks or waits.
#include "core/norm/room.h"

#include <gtest/gtest.h>

namespace fused_norm {
namespace {

using Choice = ParamsHistory::Choice;

int memory[4];
ParamsSeen seen(uint32_t version, int at = 0) { return {&memory[at], nullptr, version}; }

ColumnCounts counts(int64_t at_risk, uint16_t stamp = 0) {
  return {true, false, stamp, 0, at_risk};
}

// A training loop as the host sees it. Each step is one forward and one backward pass.
struct Loop {
  ParamsHistory history;
  uint32_t version = 7;
  int at = 0;

  Choice forward() {
    history.see(seen(version, at));
    const Choice choice = history.choose(false, true);
    if (choice == Choice::kLook) history.looked(counts(0));
    return choice;
  }
  void backward() {
    history.see(seen(version, at));
    history.backward();
  }
  void optimizer_step(int moves = 1) {
    version += moves;
    history.after_step(seen(version, at));
  }
  Choice step(int moves = 1) {
    const Choice choice = forward();
    backward();
    optimizer_step(moves);
    return choice;
  }
};

TEST(Room, ReportsSurviveTheirWord) {
  const uint64_t word = uint64_t{1} << 63 | uint64_t{0xfedc} << 46 | uint64_t{1234567} << 23 | 42;
  const ColumnCounts found = unpack_report(word);
  EXPECT_TRUE(found.valid);
  EXPECT_FALSE(found.moved);
  EXPECT_EQ(found.stamp, 0xfedc);
  EXPECT_EQ(found.lost, 1234567);
  EXPECT_EQ(found.at_risk, 42);
  EXPECT_TRUE(unpack_report(word | uint64_t{1} << 62).moved);
  EXPECT_FALSE(unpack_report(0).valid);
}

TEST(Room, AnEagerCallHasRoomForWhatItKnows) {
  const RoomLimits limits = room_limits(4096, 2);
  EXPECT_EQ(chosen_room(0, limits), 0);
  for (int64_t columns = 1; columns <= limits.most; ++columns) {
    const int64_t room = chosen_room(columns, limits);
    EXPECT_GT(room, columns);
    EXPECT_EQ(room % 4, 0);
    EXPECT_LE(room, columns + columns / 4 + 7);
  }
  EXPECT_EQ(chosen_room(8, limits), 16);
  EXPECT_EQ(chosen_room(limits.most + 1, limits), kSaveInput);
  // The list takes at most half of what the flag saves: of 16 bit a quarter of the columns in fp32.
  EXPECT_EQ(limits.most, 1024);
  EXPECT_EQ(room_limits(4096, 4).most, 2048);
  EXPECT_EQ(room_limits(4096, 8).most, 2048);
  EXPECT_LE(room_limits(int64_t{1} << 30, 4).most, kMostRoom);
}

TEST(Room, ACallThatCannotChooseHasRoomToSpare) {
  for (int64_t cols : {1, 15, 16, 17, 264, 4096, 5000, 50257, 1 << 20}) {
    const RoomLimits limits = room_limits(cols, 2);
    const int64_t least = fixed_room(0, limits, 0);
    EXPECT_GE(least, std::min<int64_t>(cols, 16));
    EXPECT_GE(least, std::min(cols, cols / 256));
    EXPECT_LE(least, cols);
    for (int64_t at_risk = 0; at_risk <= cols; at_risk += 1 + at_risk / 7) {
      const int64_t room = fixed_room(at_risk, limits, 0);
      EXPECT_TRUE(room == kSaveInput || !is_near(at_risk, room, cols)) << cols << " " << at_risk;
    }
    EXPECT_TRUE(fixed_room(cols, limits, 0) == kSaveInput || least == cols);
  }
}

TEST(Room, CompilingAnewEnds) {
  // Whatever becomes of the columns, room that was too small is so only a few times.
  for (int64_t cols : {32, 264, 4096, 65536}) {
    const RoomLimits limits = room_limits(cols, 2);
    int64_t at_risk = 0, room = 0;
    int compiled = 0;
    for (; (room = fixed_room(at_risk, limits, compiled)) != kSaveInput; ++compiled) {
      while (at_risk < cols && !is_near(at_risk, room, cols)) ++at_risk;
      if (at_risk == cols) break;
      ASSERT_LE(compiled, kLastGeneration);
    }
  }
  EXPECT_EQ(fixed_room(0, room_limits(4096, 2), kLastGeneration), kSaveInput);
}

TEST(Room, OrdinaryTrainingLooksTwice) {
  for (int moves : {0, 1, 2}) {  // fused optimizers move no counter
    Loop loop;
    EXPECT_EQ(loop.step(moves), Choice::kLook);
    EXPECT_EQ(loop.step(moves), Choice::kLook);  // how fast the parameters move was not known
    for (int step = 0; step < 20; ++step) EXPECT_EQ(loop.step(moves), Choice::kFromReport);
  }
}

TEST(Room, EvaluationAndAccumulationChangeNothing) {
  Loop loop;
  for (int step = 0; step < 3; ++step) loop.step();
  EXPECT_EQ(loop.forward(), Choice::kFromReport);
  EXPECT_EQ(loop.forward(), Choice::kKeep);
  loop.backward();
  loop.backward();
  EXPECT_EQ(loop.forward(), Choice::kKeep);
}

TEST(Room, AChangeByHandIsLookedAt) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  ++loop.version;
  EXPECT_EQ(loop.step(), Choice::kLook);
  EXPECT_EQ(loop.step(), Choice::kFromReport);
  loop.version += 3;
  EXPECT_EQ(loop.step(), Choice::kLook);
  loop.at = 1;
  EXPECT_EQ(loop.step(), Choice::kLook);
  EXPECT_EQ(loop.step(), Choice::kFromReport);
}

TEST(Room, AChangeByHandBetweenBackwardAndStepIsLookedAt) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  loop.forward();
  loop.backward();
  ++loop.version;
  loop.history.see(seen(loop.version));  // before the optimizer's step
  EXPECT_TRUE(loop.history.is_doubtful(counts(0, loop.history.stamp()), true, false));
  loop.optimizer_step();
  EXPECT_EQ(loop.forward(), Choice::kLook);
}

TEST(Room, TrainingByHandBecomesAHabit) {
  Loop loop;
  for (int step = 0; step < 8; ++step) {
    const Choice choice = loop.forward();
    EXPECT_EQ(choice, step < 3 ? Choice::kLook : Choice::kFromReport) << step;
    loop.backward();
    ++loop.version;
  }
  loop.version += 1;  // zeroed, too
  EXPECT_EQ(loop.forward(), Choice::kLook);
}

TEST(Room, OtherMemoryBecomesAHabit) {
  Loop loop;
  int looks = 0;
  for (int step = 0; step < 10; ++step) {
    loop.at = step % 3;
    looks += loop.step() == Choice::kLook;
  }
  EXPECT_LE(looks, 4);
  EXPECT_EQ(loop.step(), Choice::kFromReport);
}

TEST(Room, ACheckpointSavesTheSameTwice) {
  Loop loop;
  for (int step = 0; step < 3; ++step) loop.step();
  loop.forward();
  loop.history.see(seen(loop.version, 1));  // gathered anew
  EXPECT_EQ(loop.history.choose(true, true), Choice::kKeep);
}

TEST(Room, WeightsThatMayMoveUnseenAreLookedAtForAWhile) {
  ParamsHistory history;
  int looks = 0;
  for (int step = 0; step < 20; ++step) {
    history.see(seen(1));
    if (history.choose(false, true) == Choice::kLook) {
      ++looks;
      history.looked({true, true, history.stamp(), 0, 0});
    }
    history.backward();
  }
  EXPECT_GT(looks, 2);
  EXPECT_LT(looks, 12);
}

TEST(Room, AStepWaitsOnlyForWhatIsNotKnown) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  loop.forward();
  loop.backward();
  const uint16_t stamp = loop.history.stamp();
  for (bool fixed : {false, true}) {
    EXPECT_FALSE(loop.history.is_doubtful(counts(0, stamp), fixed, false));
    EXPECT_FALSE(loop.history.is_doubtful(counts(0, stamp - kUpdatesAhead), fixed, false));
    EXPECT_TRUE(loop.history.is_doubtful(counts(0, stamp - kUpdatesAhead - 1), fixed, false));
    EXPECT_FALSE(loop.history.is_doubtful(counts(0, stamp - 1000), fixed, true));
    EXPECT_TRUE(loop.history.is_doubtful(unpack_report(0), fixed, false));
  }
  // A new norm, whose speed nobody knows yet.
  EXPECT_TRUE(Loop().history.is_doubtful(counts(0), true, false));
  EXPECT_FALSE(Loop().history.is_doubtful(counts(0), false, false));
}

}  // namespace
}  // namespace fused_norm
