//! One page of a listing: prefix, delimiter, marker and limit over sorted keys. No I/O.

/// What a listing asks for. Keys at or before `after` were already seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) prefix: String,
    pub(super) delimiter: Option<String>,
    pub(super) after: String,
    pub(super) max: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Item<T> {
    Object(T),
    /// All keys that share this beginning, up to and with the delimiter.
    Prefix(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Page<T> {
    pub(super) items: Vec<Item<T>>,
    /// Where the next page begins, if there is one: to be given as its `after`.
    pub(super) next: Option<String>,
}

/// `all` must be in the order of key bytes.
pub(super) fn page<T>(all: impl Iterator<Item = T>, query: &Query, key_of: impl Fn(&T) -> &str) -> Page<T> {
    let mut items: Vec<Item<T>> = Vec::new();
    let mut last = String::new();
    for it in all {
        let key = key_of(&it);
        let Some(rest) = key.strip_prefix(query.prefix.as_str()) else { continue };
        if !query.after.is_empty() && key <= query.after.as_str() {
            continue;
        }
        let common = query
            .delimiter
            .as_deref()
            .filter(|delimiter| !delimiter.is_empty())
            .and_then(|delimiter| rest.find(delimiter).map(|at| &key[..query.prefix.len() + at + delimiter.len()]));
        // A page that ended with a common prefix goes on behind all keys under it.
        if common.is_some_and(|common| common == query.after || common == last) {
            continue;
        }
        if items.len() == query.max {
            return Page { items, next: (0 < query.max).then_some(last) };
        }
        last = common.unwrap_or(key).to_owned();
        items.push(match common {
            Some(_) => Item::Prefix(last.clone()),
            None => Item::Object(it),
        });
    }
    Page { items, next: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages through `keys` and shows each page; common prefixes in brackets.
    fn check(keys: &[&str], query: Query, expected: &[&str]) {
        let mut query = query;
        let mut pages = Vec::new();
        loop {
            let page = page(keys.iter().copied(), &query, |key| key);
            let items: Vec<String> = page
                .items
                .into_iter()
                .map(|item| match item {
                    Item::Object(key) => key.to_owned(),
                    Item::Prefix(prefix) => format!("[{prefix}]"),
                })
                .collect();
            pages.push(items.join(" "));
            match page.next {
                Some(next) => query.after = next,
                None => break,
            }
        }
        assert_eq!(pages, expected);
    }

    fn query(prefix: &str, delimiter: &str, max: usize) -> Query {
        let delimiter = (!delimiter.is_empty()).then(|| delimiter.to_owned());
        Query { prefix: prefix.into(), delimiter, after: String::new(), max }
    }

    const KEYS: &[&str] = &["a", "a!", "a/1", "a/2", "a/b/3", "a0", "b/1", "c"];

    #[test]
    fn pages_join_up_to_the_whole() {
        check(KEYS, query("", "", 1000), &["a a! a/1 a/2 a/b/3 a0 b/1 c"]);
        check(KEYS, query("", "", 3), &["a a! a/1", "a/2 a/b/3 a0", "b/1 c"]);
        check(KEYS, query("", "", 4), &["a a! a/1 a/2", "a/b/3 a0 b/1 c"]);
    }

    #[test]
    fn common_prefixes_count_once_even_across_pages() {
        check(KEYS, query("", "/", 1000), &["a a! [a/] a0 [b/] c"]);
        check(KEYS, query("", "/", 1), &["a", "a!", "[a/]", "a0", "[b/]", "c"]);
        check(KEYS, query("a/", "/", 2), &["a/1 a/2", "[a/b/]"]);
    }

    #[test]
    fn prefixes_need_not_end_at_a_slash() {
        check(KEYS, query("a", "/", 1000), &["a a! [a/] a0"]);
        check(KEYS, query("x", "/", 1000), &[""]);
    }

    #[test]
    fn starting_within_a_common_prefix_still_shows_it() {
        check(KEYS, Query { after: "a/1".into(), ..query("", "/", 1000) }, &["[a/] a0 [b/] c"]);
    }

    #[test]
    fn asking_for_nothing_gives_an_end_rather_than_a_loop() {
        check(KEYS, query("", "", 0), &[""]);
    }
}
