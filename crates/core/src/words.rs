//! Closed sets of words that are stored, sent or shown.
//!
//! The enum, the word of each value and the list of all values come from one table, so that neither can miss a value.

/// Makes an enum whose values each have a word:
///
/// ```
/// nstance_core::words!(
///     /// What a signal means.
///     Signal { Stop "stop", Go "go", }
/// );
/// assert_eq!(Signal::ALL.iter().map(|it| it.as_str()).collect::<Vec<_>>(), ["stop", "go"]);
/// ```
#[macro_export]
macro_rules! words {
    ($(#[$doc:meta])* $type:ident { $($(#[$item:meta])* $name:ident $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type {
            $($(#[$item])* $name,)*
        }

        impl $type {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its word.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}
