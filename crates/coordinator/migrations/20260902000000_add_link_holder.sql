-- Which coordinator holds a host's link: the `application_name` of its connections, null when none does. What an
-- earlier version wrote has none, so that its hosts count as not connected until they dial again.
ALTER TABLE hosts ADD COLUMN link_holder text;
