//! Measured times and the figures that stand for them.

use std::time::Duration;

/// Times of one thing done again and again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sample {
    times: Vec<Duration>,
}

impl Sample {
    /// Adds one measurement.
    pub(crate) fn add(&mut self, time: Duration) {
        let at = self.times.partition_point(|other| *other <= time);
        self.times.insert(at, time);
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.times.len()
    }

    /// The shortest; zero when there is none.
    pub(crate) fn min(&self) -> Duration {
        self.times.first().copied().unwrap_or_default()
    }

    /// The time that `percent` of all do not exceed (nearest rank); zero when there is none.
    pub(crate) fn percentile(&self, percent: usize) -> Duration {
        let rank = (self.times.len() * percent).div_ceil(100).max(1);
        self.times.get(rank - 1).copied().unwrap_or_default()
    }

    /// The median.
    pub(crate) fn p50(&self) -> Duration {
        self.percentile(50)
    }
}

/// Milliseconds with two decimals.
pub(crate) fn millis(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64() * 1000.0)
}

/// `left` in multiples of `right`, for people.
pub(crate) fn ratio(left: Duration, right: Duration) -> String {
    if right.is_zero() {
        "–".to_owned()
    } else {
        format!("{:.2} ×", left.as_secs_f64() / right.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        let mut sample = Sample::default();
        assert_eq!((sample.min(), sample.p50()), (Duration::ZERO, Duration::ZERO));
        for number in [30, 10, 20, 40] {
            sample.add(Duration::from_millis(number));
        }
        let of = |percent| sample.percentile(percent).as_millis();
        assert_eq!((of(0), of(25), of(50), of(51), of(99), of(100)), (10, 10, 20, 30, 40, 40));
        assert_eq!(sample.min().as_millis(), 10);
    }

    #[test]
    fn figures_are_rounded_and_nothing_is_divided_by_zero() {
        assert_eq!(millis(Duration::from_micros(12_345)), "12.35");
        assert_eq!(ratio(Duration::from_millis(3), Duration::from_millis(2)), "1.50 ×");
        assert_eq!(ratio(Duration::from_millis(3), Duration::ZERO), "–");
    }
}
