//! What a program is started with: its environment, and the files that its name may mean.

use std::collections::BTreeMap;
use std::ffi::CString;

use cloister_types::ExecSpec;

/// Where a program is looked for when its environment has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What a program takes its terminal for when nobody says which it is.
const DEFAULT_TERM: &str = "xterm-256color";
/// Most directories of a `PATH` that are tried.
const CANDIDATES_MAX: usize = 128;

/// Returns the environment: the image's, then the user's home, then what the exec gives. A program on a terminal is
/// told which kind.
pub(super) fn environment(
    image: &BTreeMap<String, String>,
    home: Option<&str>,
    spec: &ExecSpec,
) -> BTreeMap<String, String> {
    let mut env = image.clone();
    if spec.terminal.is_some() {
        env.entry("TERM".to_owned()).or_insert_with(|| DEFAULT_TERM.to_owned());
    }
    if let Some(home) = home {
        env.insert("HOME".to_owned(), home.to_owned());
    }
    env.extend(spec.env.iter().map(|(name, value)| (name.clone(), value.clone())));
    env
}

/// Returns the paths that `program` may mean, in the order in which they are tried. A name with a slash is a path.
pub(super) fn candidates(program: &str, env: &BTreeMap<String, String>) -> Vec<CString> {
    if program.contains('/') {
        return CString::new(program).into_iter().collect();
    }
    let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    path.split(':')
        .take(CANDIDATES_MAX)
        .map(|directory| match directory {
            // An empty entry is the working directory, as in a shell.
            "" => format!("./{program}"),
            directory => format!("{directory}/{program}"),
        })
        .filter_map(|candidate| CString::new(candidate).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_exec_wins_over_the_user_and_the_user_over_the_image() {
        let image = map(&[("HOME", "/root"), ("PATH", "/bin"), ("LANG", "C")]);
        let spec = ExecSpec { env: map(&[("PATH", "/x")]), ..ExecSpec::default() };
        let expected = map(&[("HOME", "/home/me"), ("PATH", "/x"), ("LANG", "C")]);
        assert_eq!(environment(&image, Some("/home/me"), &spec), expected);
        let spec = ExecSpec { env: map(&[("HOME", "/h")]), ..ExecSpec::default() };
        assert_eq!(environment(&image, Some("/home/me"), &spec)["HOME"], "/h");
    }

    #[test]
    fn a_path_is_searched_in_order() {
        let paths = |program: &str, path: &str| {
            let found = candidates(program, &map(&[("PATH", path)]));
            found.into_iter().map(|path| path.into_string().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(paths("ls", "/a:/b"), ["/a/ls", "/b/ls"]);
        assert_eq!(paths("ls", ":/b"), ["./ls", "/b/ls"]);
        assert_eq!(paths("./ls", "/a"), ["./ls"]);
        assert_eq!(candidates("ls", &BTreeMap::new()).len(), 6);
    }
}
