//! The table: what was measured, beside what, and whether the aim is met.

use std::fmt::Write as _;
use std::time::Duration;

use crate::sample::{Sample, millis, ratio};

/// A page of Markdown in the making.
#[derive(Debug, Default)]
pub(crate) struct Report {
    text: String,
}

impl Report {
    /// Adds a heading.
    pub(crate) fn section(&mut self, title: &str) {
        self.line(&format!("\n## {title}\n"));
    }

    /// Adds a line.
    pub(crate) fn line(&mut self, line: &str) {
        writeln!(self.text, "{line}").expect("writing to a string does not fail");
    }

    /// Adds a table of times; ratios are medians over the median of the row named `baseline`.
    pub(crate) fn times(&mut self, rows: &[(String, Sample)], baseline: &str) {
        let base = rows.iter().find(|(name, _)| name == baseline).map(|(_, sample)| sample.p50());
        self.line(&format!(
            "| | runs | min ms | p50 ms | p99 ms | p50 to {baseline} |\n|---|---|---|---|---|---|"
        ));
        for (name, sample) in rows {
            let ratio = base.map_or_else(|| "–".to_owned(), |base| ratio(sample.p50(), base));
            self.line(&format!(
                "| {name} | {} | {} | {} | {} | {ratio} |",
                sample.len(),
                millis(sample.min()),
                millis(sample.p50()),
                millis(sample.percentile(99)),
            ));
        }
    }

    /// Adds whether a time is within its aim.
    pub(crate) fn aim(&mut self, what: &str, measured: Duration, aim: Duration) {
        let verdict = if measured <= aim { "met" } else { "missed" };
        self.line(&format!(
            "\nAim: {what} ≤ {} ms: **{verdict}** with {} ms.",
            millis(aim),
            millis(measured)
        ));
    }

    /// Returns the page.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(milliseconds: u64) -> Sample {
        let mut sample = Sample::default();
        sample.add(Duration::from_millis(milliseconds));
        sample
    }

    #[test]
    fn ratios_are_to_the_baseline_and_an_absent_one_is_no_ratio() {
        let rows = [("ours".to_owned(), sample(6)), ("theirs".to_owned(), sample(4))];
        let mut report = Report::default();
        report.times(&rows, "theirs");
        assert!(report.text().contains("| ours | 1 | 6.00 | 6.00 | 6.00 | 1.50 × |"), "{}", report.text());
        let mut report = Report::default();
        report.times(&rows, "absent");
        assert!(report.text().contains("| ours | 1 | 6.00 | 6.00 | 6.00 | – |"), "{}", report.text());
    }

    #[test]
    fn a_missed_aim_says_so() {
        let mut report = Report::default();
        report.aim("it", Duration::from_millis(2), Duration::from_millis(1));
        assert!(report.text().contains("≤ 1.00 ms: **missed** with 2.00 ms"), "{}", report.text());
    }
}
