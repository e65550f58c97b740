package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"berth/pkg/migrate"
)

func migrateLoginsCommand() *cobra.Command {
	var (
		d    databaseFlags
		list string
	)
	cmd := &cobra.Command{
		Use:   "logins",
		Short: "Make a login for each service, or give existing ones a new password",
		Long: fmt.Sprintf(`Make logins that are members of the group roles, with the timeouts their services ask for. A login that
exists gets the password of the list. Run it after "berth migrate up", which makes the groups:
%s.

Passwords belong in the variable, where other users of the machine cannot read them.`, strings.Join(migrate.Groups(), ", ")),
		Example: "  BERTH_MIGRATE_LOGINS=scheduler:berth_scheduler:secret1,gateway:berth_gateway:secret2 berth migrate logins",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			tel, err := d.open(cmd)
			if err != nil {
				return err
			}
			defer closeTelemetry(cmd.Context(), tel)
			logins, err := parseLogins(list)
			if err != nil {
				return err
			}
			for _, l := range logins {
				if err := migrate.EnsureLogin(cmd.Context(), d.url, l.name, l.password, l.group); err != nil {
					return err
				}
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "login %s is a member of %s\n", l.name, l.group); err != nil {
					return err
				}
			}
			return nil
		},
	}
	d.flags(cmd.Flags())
	cmd.Flags().StringVar(&list, "logins", "", "comma-separated `LOGIN:GROUP:PASSWORD`")
	names := databaseVariables()
	names["logins"] = []string{"BERTH_MIGRATE_LOGINS"}
	variables(cmd.Flags(), names)
	return cmd
}

// login is one entry of the list.
type login struct{ name, group, password string }

// parseLogins reads LOGIN:GROUP:PASSWORD,…; all mistakes at once. No error shows a password.
func parseLogins(list string) ([]login, error) {
	if strings.TrimSpace(list) == "" {
		return nil, errors.New("no logins: set BERTH_MIGRATE_LOGINS to a list of LOGIN:GROUP:PASSWORD")
	}
	var logins []login
	var mistakes []error
	for i, entry := range strings.Split(list, ",") {
		name, rest, _ := strings.Cut(strings.TrimSpace(entry), ":")
		group, password, complete := strings.Cut(rest, ":")
		switch {
		case !complete || name == "" || password == "":
			mistakes = append(mistakes, fmt.Errorf("BERTH_MIGRATE_LOGINS: entry %d is not LOGIN:GROUP:PASSWORD", i+1))
		case !slices.Contains(migrate.Groups(), group):
			mistakes = append(mistakes, fmt.Errorf("BERTH_MIGRATE_LOGINS: entry %d, login %s: group %q is none of %s",
				i+1, name, group, strings.Join(migrate.Groups(), ", ")))
		case slices.ContainsFunc(logins, func(l login) bool { return l.name == name }):
			mistakes = append(mistakes, fmt.Errorf("BERTH_MIGRATE_LOGINS: entry %d: login %s is there twice", i+1, name))
		default:
			logins = append(logins, login{name, group, password})
		}
	}
	return logins, errors.Join(mistakes...)
}
