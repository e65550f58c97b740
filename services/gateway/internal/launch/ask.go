package launch

import (
	"encoding/json"
	"strings"
	"time"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/gateway/internal/body"
)

// Bounds of what a create may ask for.
const (
	maxTemplateBytes = 512
	maxImageBytes    = 2048
	maxImages        = 32
	maxCPUCount      = 4096
	maxMemoryMB      = 64 << 20 // 64 TiB
	maxNameBytes     = 128
	minIdleSeconds   = 60
)

// Ask is what placement needs to know of a create's body.
type Ask struct {
	Hint    *schedulerv1.ScheduleRequestHint
	Managed *schedulerv1.NewSandbox // nil: an observed sandbox
}

// ParseAsk checks the body of POST /sandboxes or /v2/sandboxes. A *body.Wrong names the field.
func ParseAsk(text []byte, maxTimeout time.Duration) (Ask, error) {
	o, err := body.Parse(text)
	if err != nil {
		return Ask{}, err
	}
	_, absent, err := o.Text("templateID", maxTemplateBytes)
	if err != nil {
		return Ask{}, err
	}
	if absent {
		return Ask{}, body.Wrongf("templateID: is required")
	}
	metadata, managed, err := common(o, maxTimeout)
	if err != nil {
		return Ask{}, err
	}
	return Ask{
		Hint: &schedulerv1.ScheduleRequestHint{Kind: &schedulerv1.ScheduleRequestHint_NewSandbox{
			NewSandbox: &schedulerv1.NewSandboxHint{Metadata: metadata},
		}},
		Managed: managed,
	}, nil
}

// ParseColdAsk checks the body of POST /sandboxes-cold, which names its size and images itself.
func ParseColdAsk(text []byte, maxTimeout time.Duration) (Ask, error) {
	o, err := body.Parse(text)
	if err != nil {
		return Ask{}, err
	}
	metadata, managed, err := common(o, maxTimeout)
	if err != nil {
		return Ask{}, err
	}
	cpus, _, err := o.Whole("cpuCount", body.Whole{Min: 1, Max: maxCPUCount})
	if err != nil {
		return Ask{}, err
	}
	memory, _, err := o.Whole("memoryMB", body.Whole{Min: 1, Max: maxMemoryMB})
	if err != nil {
		return Ask{}, err
	}
	images, err := images(o)
	if err != nil {
		return Ask{}, err
	}
	return Ask{
		Hint: &schedulerv1.ScheduleRequestHint{Kind: &schedulerv1.ScheduleRequestHint_NewColdSandbox{
			NewColdSandbox: &schedulerv1.NewColdSandboxHint{
				CpuCount: uint32(cpus), MemoryMb: uint64(memory), Images: images, Metadata: metadata,
			},
		}},
		Managed: managed,
	}, nil
}

// common checks what both forms share.
func common(o body.Object, maxTimeout time.Duration) (map[string]string, *schedulerv1.NewSandbox, error) {
	if _, _, err := o.Whole("timeout", body.Whole{Min: 1, Max: int64(maxTimeout / time.Second)}); err != nil {
		return nil, nil, err
	}
	metadata, err := o.Metadata("metadata")
	if err != nil {
		return nil, nil, err
	}
	managed, err := managed(o)
	return metadata, managed, err
}

// managed returns what a "berth" object asks for.
func managed(o body.Object) (*schedulerv1.NewSandbox, error) {
	raw, asked := o["berth"]
	if !asked {
		return nil, nil //nolint:nilnil // nothing was asked for
	}
	fields, err := body.Parse(raw)
	if err != nil {
		return nil, body.Wrongf("berth: must be an object")
	}
	name, _, err := fields.Text("name", maxNameBytes)
	if err != nil {
		return nil, body.Wrongf("berth.%v", err)
	}
	idle, _, err := fields.Whole("idleAfter", body.Whole{Min: minIdleSeconds, Max: maxIdleSeconds})
	if err != nil {
		return nil, body.Wrongf("berth.%v", err)
	}
	wake, err := autoResume(o)
	if err != nil {
		return nil, err
	}
	return &schedulerv1.NewSandbox{Name: name, IdleAfterMs: idle * 1000, WakeOnTraffic: wake}, nil
}

const maxIdleSeconds = 365 * 24 * 3600

func autoResume(o body.Object) (bool, error) {
	raw, present := o["autoResume"]
	if !present || string(raw) == "null" {
		return false, nil
	}
	fields, err := body.Parse(raw)
	if err != nil {
		return false, body.Wrongf("autoResume: must be an object")
	}
	enabled, err := fields.Bool("enabled")
	if err != nil {
		return false, body.Wrongf("autoResume.enabled: must be true or false")
	}
	return enabled, nil
}

// images returns the image and those of the attached drives, in that order.
func images(o body.Object) ([]string, error) {
	var found []string
	image, absent, err := o.Text("image", maxImageBytes)
	if err != nil {
		return nil, err
	}
	if !absent {
		found = append(found, image)
	}
	raw, present := o["attachedDrives"]
	if !present || string(raw) == "null" {
		return found, nil
	}
	var drives []struct {
		Source struct {
			Image *string `json:"image"`
		} `json:"source"`
	}
	if json.Unmarshal(raw, &drives) != nil {
		return nil, body.Wrongf("attachedDrives: must be a list of drives, each with a source")
	}
	for _, drive := range drives {
		if drive.Source.Image == nil {
			continue
		}
		text := *drive.Source.Image
		if strings.TrimSpace(text) == "" || len(text) > maxImageBytes || strings.ContainsRune(text, 0) {
			return nil, body.Wrongf("attachedDrives: source.image must be a text of 1 to %d bytes", maxImageBytes)
		}
		found = append(found, text)
	}
	if len(found) > maxImages {
		return nil, body.Wrongf("attachedDrives: %d images, at most %d", len(found), maxImages)
	}
	return found, nil
}
