//! The page of results: one section for each command that measures, so that each rewrites its own and no other.
//!
//! A section begins with a heading of the first level, which names it, and ends before the next one.

use std::io;
use std::path::Path;

/// Puts a section, which begins with its heading, into the page at `path`: in the place of the one with the same
/// heading, or at the end.
pub(crate) fn write_section(path: &Path, section: &str) -> io::Result<()> {
    let page = match std::fs::read_to_string(path) {
        Ok(page) => page,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error),
    };
    std::fs::write(path, with_section(&page, section))
}

fn with_section(page: &str, section: &str) -> String {
    let heading = section.lines().next().unwrap_or_default();
    let mut sections = sections(page);
    match sections.iter_mut().find(|found| found.lines().next() == Some(heading)) {
        Some(found) => *found = section,
        None => sections.push(section),
    }
    let trimmed: Vec<&str> = sections.iter().map(|text| text.trim_end()).collect();
    format!("{}\n", trimmed.join("\n\n"))
}

/// Returns the sections of a page. A line of code that begins like a heading is none.
fn sections(page: &str) -> Vec<&str> {
    let mut starts = Vec::new();
    let (mut offset, mut is_code) = (0, false);
    for line in page.split_inclusive('\n') {
        if line.starts_with("```") {
            is_code = !is_code;
        } else if !is_code && line.starts_with("# ") {
            starts.push(offset);
        }
        offset += line.len();
    }
    let ends = starts.iter().skip(1).copied().chain([page.len()]);
    starts.iter().zip(ends).map(|(start, end)| &page[*start..end]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_replaced_and_the_others_stay_as_they_are() {
        let page = "# One\n\n```\n# no heading\n```\n\n## Part\n\nold\n\n# Two\n\nstays\n";
        let page = with_section(page, "# One\n\nnew\n");
        assert_eq!(page, "# One\n\nnew\n\n# Two\n\nstays\n");
        assert_eq!(with_section(&page, "# One\n\nnew\n"), page);
        assert_eq!(with_section(&page, "# Three\n\nmore\n"), format!("{page}\n# Three\n\nmore\n"));
        assert_eq!(with_section("", "# One\n"), "# One\n");
    }
}
